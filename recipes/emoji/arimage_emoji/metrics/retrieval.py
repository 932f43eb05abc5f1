"""The metric `retrieval`: whether the picture of a gallery that is nearest to an image has the name of its prompt."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from arimage.eval.metrics.features import image_paths
from arimage.media.files import read_image
from arimage.media.gallery import GALLERY_SIZE

from .reference import asked_names, to_pixels


def nearest_pictures(samples: torch.Tensor, gallery: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distances and the indices, both [M, count], of the pictures of the gallery that are nearest to each sample,
    the nearest first. Distances are L2 between pixels at 32x32, downscaled by averaging areas.

    Args:
        samples: float [M, 3, S, S] in [0, 1].
        gallery: float [K, 3, T, T] in [0, 1].
    """
    pixels = [F.interpolate(images.float(), size=(32, 32), mode="area").flatten(1) for images in (samples, gallery)]
    distances, indices = torch.cdist(*pixels).topk(count, largest=False)
    return distances, indices


def retrieval_hits(
    samples: torch.Tensor, concepts: list[str], gallery: torch.Tensor, gallery_concepts: list[str]
) -> torch.Tensor:
    """Whether the nearest, second nearest, ... picture of the gallery shows the concept of each sample: bool [M, 5].

    Args:
        samples: float [M, 3, S, S] in [0, 1].
        concepts: what each sample should show.
        gallery: float [K, 3, T, T] in [0, 1].
        gallery_concepts: what each picture of the gallery shows.
    """
    _, nearest = nearest_pictures(samples, gallery, 5)
    return torch.tensor(
        [
            [gallery_concepts[j] == concept for j in row]
            for row, concept in zip(nearest.tolist(), concepts, strict=True)
        ]
    )


def emoji_retrieval(run: Path, gallery: torch.Tensor, gallery_names: list[str]) -> torch.Tensor:
    """`retrieval_hits` of the images of a run in manifest order, bool [N, 5]. The manifest names the concepts.

    Raises:
        ValueError: if a row of the manifest has no name, or one that is not in the gallery.
    """
    names = asked_names(run, gallery_names)
    pixels = np.stack([to_pixels(read_image(path), GALLERY_SIZE) for path in image_paths(run)])
    return retrieval_hits(torch.from_numpy(pixels), names, gallery, gallery_names)
