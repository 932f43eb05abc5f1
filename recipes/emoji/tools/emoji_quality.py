"""Quality of the packaged models on their data set: retrieval of captions, and PSNR of reconstructions."""

import torch
import torch.nn.functional as F

from arimage.pipelines.base import ARImagePipeline
from arimage_emoji.metrics.retrieval import retrieval_hits
from arimage_emoji.training.captioned import ImageCaptions


def caption_retrieval(
    pipe: ARImagePipeline, data: ImageCaptions, gallery: ImageCaptions, *, count: int, seed: int = 0, **settings
) -> dict[str, float]:
    """Generate `count` primary captions of `data`, chosen without replacement by `seed`, and look the images up in
    `gallery`.

    `settings` go to the pipeline. Returns the shares of `retrieval_accuracy` for the exact name, "top-1" and "top-5",
    and for any skin tone of the concept, "top-1 of any tone" and "top-5 of any tone".
    """
    chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    generator = torch.Generator().manual_seed(seed)
    samples = torch.cat(
        [
            pipe([data.captions[i][0] for i in batch], generator=generator, output_type="pt", **settings).images.cpu()
            for batch in (chosen[start : start + 25] for start in range(0, count, 25))
        ]
    )
    pixels = gallery.images / 255
    named = retrieval_accuracy(samples, [data.names[i] for i in chosen], pixels, gallery.names)
    toned = retrieval_accuracy(samples, [data.bases[i] for i in chosen], pixels, gallery.bases)
    return named | {f"{name} of any tone": share for name, share in toned.items()}


def retrieval_accuracy(
    samples: torch.Tensor, concepts: list[str], gallery: torch.Tensor, gallery_concepts: list[str]
) -> dict[str, float]:
    """Shares of samples whose nearest image of the gallery ("top-1"), or one of the five nearest ("top-5"), shows the
    concept. Arguments as in `retrieval_hits`.
    """
    hits = retrieval_hits(samples, concepts, gallery, gallery_concepts)
    return {"top-1": float(hits[:, 0].float().mean()), "top-5": float(hits.any(1).float().mean())}


def psnr(images: torch.Tensor, reconstructions: torch.Tensor) -> float:
    """Mean over images [M, 3, S, S] in [0, 1] of the peak signal-to-noise ratio in dB."""
    errors = (images - reconstructions).pow(2).flatten(1).mean(-1)
    return float((-10 * errors.log10()).mean())


def patch_kmeans_reconstructions(
    train: torch.Tensor, heldout: torch.Tensor, patch_size: int, count: int, *, rounds: int = 12, seed: int = 0
) -> torch.Tensor:
    """Held-out images [K, 3, S, S] rebuilt from the `count` k-means centres of the patches of `train` [M, 3, S, S]: a
    codebook without a network, which a trained tokenizer with the same grid must beat."""

    def patches(images: torch.Tensor) -> torch.Tensor:
        return F.unfold(images, patch_size, stride=patch_size).transpose(1, 2)

    def nearest(points: torch.Tensor) -> torch.Tensor:
        half_norms = centres.pow(2).sum(-1) / 2
        return torch.cat([(chunk @ centres.T - half_norms).argmax(-1) for chunk in points.split(65536)])

    generator = torch.Generator().manual_seed(seed)
    points = patches(train).flatten(0, 1)
    points = points[torch.randperm(len(points), generator=generator)[:200_000]]
    centres = points[torch.randperm(len(points), generator=generator)[:count]]
    for _ in range(rounds):
        index = nearest(points)
        sums = torch.zeros_like(centres).index_add_(0, index, points)
        counts = torch.bincount(index, minlength=count)
        fresh = points[torch.randint(len(points), (count,), generator=generator)]
        centres = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], fresh)
    held = patches(heldout)
    rebuilt = centres[nearest(held.flatten(0, 1))].reshape(held.shape).transpose(1, 2)
    return F.fold(rebuilt, heldout.shape[-2:], patch_size, stride=patch_size)
