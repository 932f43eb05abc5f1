"""Pictures with captions in memory, in every layout of a data set."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ...media.folders import IMAGE_SUFFIXES, Listing, list_files, say_left_out
from ..data.pictures import to_unit_range
from ..data.row import SEPARATOR, decode
from ..data.sources import open_source


@dataclass
class Pairs:
    """Pictures uint8 [M, 3, H, W] and the caption of each."""

    images: torch.Tensor
    captions: list[str]

    def __len__(self) -> int:
        return len(self.captions)

    def take(self, index: list[int]) -> "Pairs":
        return Pairs(self.images[index], [self.captions[i] for i in index])

    def pictures(self) -> list[bytes]:
        """A digest of each picture: equal where a picture has several captions."""
        return [hashlib.sha256(image.numpy().tobytes()).digest() for image in self.images]

    def pixels(self, index: slice | list[int]) -> torch.Tensor:
        """float32 [B, 3, H, W] in [-1, 1]."""
        return to_unit_range(self.images[index])


def load_pairs(data: str | Path, size: tuple[int, int], caption: str | None = None, *, numbers: bool = False) -> Pairs:
    """Read pictures and captions, and resize and crop the pictures to `size` (height, width).

    Args:
        data: see `open_source`. Classes with names give these as captions. A picture of several captions has a row for
            each.
        caption: a template for all captions, in which {} stands for the picture's own. Without {} no picture of a
            folder needs one.
        numbers: whether classes without names give their ids as captions, for a model of classes.

    Raises:
        ValueError: if there are no pictures, or one cannot be read or has no caption.
    """
    images, captions = [], []
    for where, file, texts in _rows(str(data), caption is not None and "{}" not in caption, numbers):
        image = ImageOps.fit(decode(where, file), size[::-1], Image.Resampling.LANCZOS)
        images += [torch.from_numpy(np.array(image)).permute(2, 0, 1)] * len(texts)
        captions += [text if caption is None else caption.replace("{}", text) for text in texts]
    return Pairs(torch.stack(images), captions)


def _rows(data: str, alike: bool, numbers: bool) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    found = list_files(Path(data), IMAGE_SUFFIXES) if alike and Path(data).is_dir() else Listing()
    if found.files:
        say_left_out(data, [*found.others, *found.lost])
        for name in found.files:
            path = str(Path(data) / name)
            yield path, {"bytes": None, "path": path}, [""]
        return
    source = open_source(data)
    names = source.classes if source.labelled else None
    if source.labelled and names is None and not (numbers or alike):
        raise ValueError(
            f"{data} has classes without names, and the model reads captions: give captions, or --caption for all"
        )
    for where, file, text in source.read():
        yield where, file, text.split(SEPARATOR) if names is None else [names[int(text)]]
