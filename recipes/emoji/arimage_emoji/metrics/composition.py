"""The metric `checks`: whether an image shows the objects, the colour and the number that its prompt asks for.

GenEval (https://arxiv.org/abs/2310.11513) asks the same with a detector. Here objects are the connected parts on a
plain background; the name of an object is that of its nearest picture in a gallery, and its colour is its most common
hue.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from arimage.eval.metrics.features import image_paths
from arimage.eval.runs.run_folder import read_rows
from arimage.media.files import read_image

from .colours import COLOURS, colour_shares, main_hues, recolour


# Sides in pixels of the images that are searched for parts, and of the parts that are compared.
SIZE, PART_SIZE = 64, 32
# Pixels that differ less from the background belong to it; parts that cover a smaller share of the image are specks.
_DIFFERENCE, _SPECK = 24, 0.006
# A picture has one colour if this share of it is near one hue, and shows an asked colour if this share of it has that.
ONE_COLOUR, _HAS_COLOUR = 0.6, 0.25


def foreground(images: torch.Tensor) -> torch.Tensor:
    """Where images, uint8 [M, 3, S, S], differ from the median colour of their border: bool [M, S, S]."""
    border = torch.cat([images[..., 0, :], images[..., -1, :], images[..., :, 0], images[..., :, -1]], -1)
    background = border.median(-1).values[..., None, None]
    return (images.int() - background.int()).abs().amax(1) > _DIFFERENCE


def connected_parts(mask: torch.Tensor) -> list[torch.Tensor]:
    """The connected parts of a mask, bool [S, S], from left to right and without specks: bool [S, S] each. Corners
    connect."""
    labels = torch.arange(1, mask.numel() + 1, dtype=torch.float32).view(1, 1, *mask.shape) * mask
    while True:
        grown = F.max_pool2d(labels, 3, stride=1, padding=1) * mask
        if torch.equal(grown, labels):
            break
        labels = grown
    found, sizes = labels[0, 0][mask].unique(return_counts=True)
    parts = [labels[0, 0] == label for label in found[sizes >= _SPECK * mask.numel()]]
    return sorted(parts, key=lambda part: float(part.nonzero()[:, 1].float().mean()))


def cut_out(image: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """The `part` of an image, uint8 [3, S, S], on white and as large as fits: uint8 [3, 32, 32]."""
    rows, columns = (part.any(axis).nonzero() for axis in (1, 0))
    top, left, bottom, right = int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1
    alone = torch.where(part, image, 255)[:, top:bottom, left:right].float()
    height, width = bottom - top, right - left
    scale = PART_SIZE / max(height, width)
    size = [max(1, round(height * scale)), max(1, round(width * scale))]
    alone = F.interpolate(alone[None], size=size, mode="bilinear", antialias=True, align_corners=False)[0]
    down, across = PART_SIZE - size[0], PART_SIZE - size[1]
    padding = [across // 2, across - across // 2, down // 2, down - down // 2]
    return F.pad(alone, padding, value=255).round().clamp(0, 255).byte()


class Judge:
    """Compares images with a gallery of pictures on white, float [K, 3, 32, 32] in [0, 1], and their `names`."""

    def __init__(self, gallery: torch.Tensor, names: list[str]):
        self.gallery, self.names = gallery, names
        self._recoloured: dict[str, torch.Tensor] = {}

    @cached_property
    def parts(self) -> torch.Tensor:
        """The pictures of the gallery as `cut_out` returns them, float [K, 3, 32, 32] in [0, 1]."""
        pictures = (self.gallery * 255).round().byte()
        pairs = zip(pictures, foreground(pictures), strict=True)
        return torch.stack([cut_out(one, mask) if mask.any() else one for one, mask in pairs]) / 255

    def recoloured(self, colour: str) -> torch.Tensor:
        """The gallery, with `colour` in place of the colour of every picture that has only one."""
        if colour not in self._recoloured:
            pictures = (self.gallery * 255).round().byte()
            hues, shares = main_hues(pictures, foreground(pictures))
            one = torch.from_numpy(shares >= ONE_COLOUR)[:, None, None, None]
            self._recoloured[colour] = torch.where(one, recolour(pictures, hues, colour), pictures) / 255
        return self._recoloured[colour]

    def nearest_names(self, image: torch.Tensor, gallery: torch.Tensor, count: int) -> set[str]:
        """The names of the `count` nearest pictures of `gallery`. Distances are measured as in
        `retrieval.retrieval_hits`."""
        pixels = F.interpolate(image[None] / 255, size=(PART_SIZE, PART_SIZE), mode="area").flatten(1)
        # For a single image several times faster than by a matrix product.
        mode = "donot_use_mm_for_euclid_dist"
        distances = torch.cdist(pixels, gallery.flatten(1), compute_mode=mode)[0]
        return {self.names[i] for i in distances.topk(count, largest=False).indices.tolist()}

    def colour(self, image: torch.Tensor, colour: str) -> bool:
        """Whether `colour` is the most common colour of the object in `image`, uint8 [3, S, S]."""
        shares = colour_shares(image[None], foreground(image[None]))[0]
        asked = list(COLOURS).index(colour)
        return bool(shares.argmax() == asked and shares[asked] >= _HAS_COLOUR)

    def objects(self, image: torch.Tensor, expected: list[list[str]]) -> tuple[bool, bool]:
        """Whether an image has as many parts as `expected`, and whether these parts show, in any order, one of the
        names in each element of `expected`. A part shows a name if one of its five nearest pictures has it."""
        parts = connected_parts(foreground(image[None])[0])
        if len(parts) != len(expected):
            return False, False
        near = [self.nearest_names(cut_out(image, part), self.parts, 5) for part in parts]
        hits = np.array([[not found.isdisjoint(names) for names in expected] for found in near])
        return True, _assigned(hits)


def _assigned(hits: np.ndarray) -> bool:
    """Whether every row of a square bool matrix can be assigned its own column in which it is true."""
    if not len(hits):
        return True
    return any(_assigned(np.delete(hits[1:], column, 1)) for column in np.flatnonzero(hits[0]))


def check_image(judge: Judge, image: torch.Tensor, row: dict) -> dict[str, bool]:
    """The outcomes of the check of one image, by their names.

    Args:
        image: uint8 [3, 64, 64].
        row: the fields of its prompt: `check`, `parts` (for each object the names that are right) and, for the check
            "colours", `colour`.

    Raises:
        ValueError: if the check is unknown.
    """
    check, parts = row.get("check"), row.get("parts", [])
    if check in ("known", "paraphrases"):
        return {check: not judge.nearest_names(image, judge.gallery, 1).isdisjoint(parts[0])}
    if check == "colours":
        right = judge.colour(image, row["colour"])
        named = judge.nearest_names(image, judge.recoloured(row["colour"]), 5)
        return {"colours": right, "coloured-objects": right and not named.isdisjoint(parts[0])}
    if check in ("counts", "pairs"):
        count, names = judge.objects(image, parts)
        return {f"{check}-parts": count, check: names}
    raise ValueError(f"the prompt {row.get('prompt')!r} has the check {check!r}: generate with --prompts emoji-checks")


def check_run(run: Path, gallery: torch.Tensor, names: list[str]) -> list[dict[str, bool]]:
    """The outcomes of `check_image` for the images of a run with the prompts `emoji-checks`, in manifest order.

    Raises:
        ValueError: if a row of the manifest has no check, or an unknown one.
    """
    judge = Judge(gallery, names)
    outcomes = []
    for row, path in zip(read_rows(run), image_paths(run), strict=True):
        image = read_image(path).resize((SIZE, SIZE), Image.Resampling.BOX)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        outcomes.append(check_image(judge, pixels, {"prompt": row.get("prompt"), **row.get("metadata", {})}))
    return outcomes
