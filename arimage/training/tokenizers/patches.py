"""Fitting of patch tokenizers: a codebook by k-means, in place of a training."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ...eval.runs.files import to_lines, write_whole
from ...settings.schema import COMPLETE, Items, Seed, Share
from ...tokenizers.vq_patches import PatchVQModel
from ..data.pictures import Pixels, to_unit_range
from ..resuming import alone_in
from ..saving import replace_folder
from .quantisers import kmeans
from .reconstructions import report_reconstructions


# Images that are read at a time.
CHUNK = 256
# `torch.multinomial` chooses among no more.
MOST = 2**24
# Values of patches that are looked at, per unit.
LEVELS = 8


@dataclass(frozen=True)
class PatchSettings:
    """How the codebook of a `PatchVQModel` is fitted.

    K-means looks at `points` patches of `images` images. Most patches of drawings are blank, so one counts as often as
    the square root of how often it is there. A patch of the codebook whose pixels are all nearer to white, or to
    black, than the share `plain` of the way from grey becomes plain: the mean of such patches has a grain that an eye
    sees. With 1 none does.
    """

    images: Items = 8000
    points: Items = 200_000
    plain: Share = 1.0
    seed: Seed = 0
    __pydantic_config__ = COMPLETE


def plain(codebook: torch.Tensor, share: float) -> torch.Tensor:
    """Patches [V, D] in [-1, 1], those whose values are all above `share`, or all below its negative, as 1 or -1."""
    sign = codebook.sign()
    return torch.where(((codebook * sign[:, :1]) > share).all(1, keepdim=True), sign, codebook)


@torch.no_grad()
def fit_codebook(vq: PatchVQModel, data: Pixels, settings: PatchSettings) -> None:
    """Fit the codebook of `vq` to images."""
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = torch.randperm(len(data), generator=generator)[: settings.images]
    # In bytes, since there are many.
    found = [
        (vq.to_patches(to_unit_range(data.read(part.tolist())[0])).flatten(0, 2) * LEVELS).round().to(torch.int8)
        for part in chosen.split(CHUNK)
    ]
    patches = torch.cat(found)
    points, counts = torch.unique(patches[:: len(patches) // MOST + 1], dim=0, return_counts=True)
    codes = len(vq.codebook.weight)
    if len(points) < codes:
        raise ValueError(
            f"codebook_size is {codes}, and the images have {len(points)} different patches: give fewer codes, or "
            "more images"
        )
    count = min(settings.points, len(points))
    sampled = torch.multinomial(counts.float().sqrt(), count, replacement=True, generator=generator)
    centres = kmeans(points[sampled].float() / LEVELS, codes, generator, spherical=False)
    vq.codebook.weight.copy_(plain(centres, settings.plain))


@torch.no_grad()
def train_patches(
    model_config: dict, data: Pixels, heldout: Pixels, settings: PatchSettings, out: Path, device: str = "cpu"
) -> PatchVQModel:
    """Fit a `PatchVQModel(**model_config)` to `data` and save it in the folder `out`/tokenizer, in float32. `out` gets
    the held-out PSNR in log.jsonl, and reconstructions. It takes seconds, so a second call begins again.

    Raises:
        ValueError: if the images have fewer different patches than the codebook.
    """
    vq = PatchVQModel(**model_config).eval()
    fit_codebook(vq, data, settings)
    vq.to(device)

    def quantised(images: torch.Tensor) -> list[torch.Tensor]:
        return [vq.encode(to_unit_range(images.to(device)))]

    with alone_in(out):
        figures = report_reconstructions(heldout, quantised, vq.decode, out)
        write_whole(out / "log.jsonl", lambda file: file.write_bytes(to_lines([figures])))
        replace_folder(out / "tokenizer", vq.save_pretrained)
    return vq
