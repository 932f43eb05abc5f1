"""Does an image show what its prompt names? Its nearest picture in a gallery should have that name."""

import torch
import torch.nn.functional as F


def retrieval_hits(
    samples: torch.Tensor, concepts: list[str], gallery: torch.Tensor, gallery_concepts: list[str]
) -> torch.Tensor:
    """bool [M, 5]: whether the nearest, second nearest, ... image of the gallery shows the concept. Distances are L2 between
    pixels at 32x32, downscaled by area averaging.

    Args:
        samples: float [M, 3, S, S] in [0, 1]; `concepts`: what each should show.
        gallery: float [K, 3, T, T] in [0, 1]; `gallery_concepts`: what each shows.
    """
    pixels = [F.interpolate(images.float(), size=(32, 32), mode="area").flatten(1) for images in (samples, gallery)]
    nearest = torch.cdist(*pixels).topk(5, largest=False).indices
    return torch.tensor(
        [
            [gallery_concepts[j] == concept for j in row]
            for row, concept in zip(nearest.tolist(), concepts, strict=True)
        ]
    )
