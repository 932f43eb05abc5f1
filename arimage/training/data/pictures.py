"""Images that networks are trained on, and sheets of images."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from PIL import Image

from ...eval.runs.files import write_whole


class Pixels(Protocol):
    """Images to train on, in memory or not: uint8 [B, 3, S, S] on white, and their coverage, uint8 [B, 1, S, S], 255 =
    opaque."""

    @property
    def size(self) -> int:
        """Pixels along each side of an image."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """What says which images they are, for the settings of a run."""
        ...

    def __len__(self) -> int: ...

    def read(self, images: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Some images by their numbers, and their coverage."""
        ...

    def batch(self, step: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """`count` images for a step of the training, which depend on nothing but the step and the random numbers."""
        ...


def to_unit_range(images: torch.Tensor) -> torch.Tensor:
    """uint8 images to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def save_grid(images: torch.Tensor, path: Path, columns: int) -> None:
    """Save images [M, 3, S, S] in [0, 1] as one image, row by row, with white in place of missing ones."""
    images = F.pad(images.float().cpu(), [0] * 7 + [-len(images) % columns], value=1)
    grid = images.unflatten(0, (-1, columns)).permute(0, 3, 1, 4, 2).flatten(0, 1).flatten(1, 2)
    image = Image.fromarray((grid * 255).round().byte().numpy())
    write_whole(path, lambda file: image.save(file, "PNG"))
