"""Images of any data set that a tokenizer or an upscaler is trained on: they are read when a batch needs them, so that
memory does not grow with the data set."""

import copy
import functools
import hashlib
import io
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from ..media.files import open_image, to_rgb, to_rgba
from ..media.folders import say_left_out
from .data.folder import SHARDS, check_found, column_of, split_folder
from .data.shards import IMAGES, check_shards, encoded, has_rows, load_rows, open_shard, pattern_of
from .data.sources import find_data
from .data.splits import part_of
from .resuming import digest
from .tokens.batches import Epochs, Prepared
from .tokens.views import centre_crop


logger = logging.getLogger(__name__)
# Steps that the processes which prepare batches may count to.
ALWAYS = 2**62
# Images that say which data set it is.
PROBES = 64


@dataclass(frozen=True)
class FolderImages:
    """Images of a folder: what errors call each, and its file."""

    folder: Path
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    def shared_with(self, other: Any) -> int:
        """How many of the images of another source are in this one, by their paths."""
        theirs = set(other.places()) if isinstance(other, FolderImages) else set()
        return sum(place in theirs for place in self.places()) if theirs else 0

    def places(self) -> Iterator[str]:
        """The path of each image, without links to the folders above it."""

        @functools.cache
        def resolved(place: str) -> str:
            return os.path.realpath(self.folder / place)

        return (os.path.join(resolved(os.path.dirname(name)), os.path.basename(name)) for name in self.names)

    def __getitem__(self, number: int) -> tuple[str, Path | io.BytesIO]:
        path = self.folder / self.names[number]
        return str(path), path


@dataclass(frozen=True)
class TableImages:
    """Images in the column `image` of a `datasets.Dataset`, whose paths are relative to `folder`: those with these
    `numbers` in the files `source`, or in the split of the Hub that it names."""

    rows: Any
    name: str
    image: str
    folder: Path | None
    source: tuple[str, ...]
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.rows)

    def shared_with(self, other: Any) -> int:
        """How many of the images of another source are in this one, by their numbers in the same files."""
        if not isinstance(other, TableImages) or self.source != other.source:
            return 0
        ours = self.numbers if isinstance(self.numbers, range) else set(self.numbers)
        return sum(number in ours for number in other.numbers)

    def __getitem__(self, number: int) -> tuple[str, Path | io.BytesIO]:
        where = f"{self.name}, row {self.numbers[number] + 1}"
        found = encoded(where, self.image, self.rows[number][self.image], self.folder)
        if found["bytes"] is None:
            return found["path"], Path(found["path"])
        return where, io.BytesIO(found["bytes"])


class PixelSource:
    """The images of a data set on disk, as `Pixels`: each once per epoch, in a new order that follows from `seed`.
    `workers` processes prepare the batches of the next steps, or none if 0."""

    def __init__(self, files: FolderImages | TableImages, size: int, seed: int, workers: int):
        self.files, self.size, self.seed, self.workers = files, size, seed, workers
        self._next: tuple[int, int, Iterator] | None = None

    def __len__(self) -> int:
        return len(self.files)

    def __getstate__(self) -> dict:
        # Processes that prepare batches read rows only.
        return self.__dict__ | {"_next": None}

    @property
    def about(self) -> dict[str, Any]:
        some = [self.files[number][1] for number in range(len(self))[:: len(self) // PROBES + 1]]
        data = [file.read_bytes() if isinstance(file, Path) else file.getvalue() for file in some]
        images = digest([hashlib.sha256(one).hexdigest() for one in data])
        return {"count": len(self), "size": self.size, "seed": self.seed, "images": images}

    def shared_with(self, other: "PixelSource") -> int:
        """How many images of another source are in this one too, as far as their paths, their numbers in the same
        files, or samples of them say it."""
        return self.files.shared_with(other.files) or (len(other) if self.about == other.about else 0)

    def read(self, images: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Some images by their numbers, and their coverage: squares in the middle, resized to S x S pixels.

        Raises:
            ValueError: if one cannot be read.
        """
        found = [self._read(number) for number in images]
        return torch.stack([pixels for pixels, _ in found]), torch.stack([alpha for _, alpha in found])

    def _read(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        where, file = self.files[number]
        image, square = open_image(where, file), (self.size, self.size)
        alpha = torch.full((1, *square), 255, dtype=torch.uint8)
        if image.has_transparency_data:
            image = to_rgba(where, image)
            alpha = torch.from_numpy(np.array(centre_crop(image.getchannel("A"), square)))[None]
        pixels = torch.from_numpy(np.array(centre_crop(to_rgb(where, image), square)))
        return pixels.permute(2, 0, 1), alpha

    def batch(self, step: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        if self._next is None or self._next[:2] != (step, count):
            # The processes of the batches before end here.
            self._next = None
            # A copy, which does not hold the batches.
            rows = Batches(copy.copy(self), count)
            self._next = step, count, Prepared(rows, range(step, ALWAYS), self.workers)
        batches = self._next[2]
        found = next(batches)
        self._next = step + 1, count, batches
        if isinstance(found, ValueError):
            raise found
        return found


class Batches(Dataset):
    """The batch of every step. What is wrong with an image is returned, since an error that a process raises would
    come with its traceback."""

    def __init__(self, source: PixelSource, count: int):
        self.source, self.count = source, count
        self.epochs = Epochs(len(source), source.seed)

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor] | ValueError:
        try:
            return self.source.read(self.epochs.images(range(step * self.count, (step + 1) * self.count)))
        except ValueError as error:
            return error


def open_pixels(
    data: str | Path,
    size: int,
    *,
    split: str = "train",
    image: str | None = None,
    seed: int = 0,
    workers: int = 2,
) -> PixelSource:
    """Open the images of a data set, of which captions or classes are not needed. Images in a folder stay where they
    are; shards, and a data set of the Hugging Face Hub, are first written to the cache of `datasets`, once.

    Args:
        data: a folder of images, with all folders in it; a folder or a pattern (`shards/*.tar`) of .parquet, .arrow or
            webdataset .tar files; or the id of a data set of the Hub. Other files of a folder are counted and named in
            a warning.
        size: pixels along each side of the images.
        split: of a data set of the Hub, of shards that are named after splits, or of a folder with folders such as
            train and val; and which part of it is taken, as in "train[:1000]".
        image: the column of the images; by default the first of `IMAGES`.
        seed: of the order in which images are learned.
        workers: processes that prepare batches.

    Raises:
        ValueError: if the data set does not exist, or has no images.
    """
    import datasets

    name = str(data)
    found = find_data(name, split=split)
    if found.folder is not None:
        folder, listing = split_folder(name, found.folder, split, videos=False, captions=False)
        check_found(folder, listing, videos=False)
        say_left_out(name, [*listing.others, *listing.lost])
        chosen = [listing.files[number] for number in part_of(name, split, len(listing.files))]
        return PixelSource(FolderImages(folder, chosen), size, seed, workers)
    if found.shards is None:
        rows, columns = load_rows(name, name, split=split, streaming=False)
        column = column_of(name, columns, image, IMAGES, "image")
        source, numbers = (name, split), range(len(rows))
    else:
        shards = list(filter(has_rows, found.shards))
        if not shards:
            raise ValueError(f"{name} has no rows: give another data set")
        column = column_of(name, open_shard(shards[0])[1], image, IMAGES, "image")
        kind = SHARDS[shards[0].suffix.lower()]
        # Of a file of tables no more is read, whatever the others hold.
        files = {"data_files": [pattern_of(path) for path in shards]} | (
            {"columns": [column]} if kind == "parquet" else {}
        )
        try:
            # Their split is chosen already.
            rows, _ = load_rows(kind, name, split="train", streaming=False, **files)
        except ValueError:
            check_shards(shards, column)
            raise
        source, numbers = tuple(str(path.resolve()) for path in shards), part_of(name, split, len(rows))
        rows = rows.select(numbers)
    rows = rows.select_columns([column])
    if isinstance(rows.features[column], datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    folder = None if found.shards is None else found.shards[0].parent
    return PixelSource(TableImages(rows, name, column, folder, source, numbers), size, seed, workers)


def open_both(
    train: str | Path, heldout: str | Path, size: int, *, split: str, heldout_split: str, **options: Any
) -> tuple[PixelSource, PixelSource]:
    """Images to train on and held-out ones, see `open_pixels`. Those that are in both are counted in a warning."""
    data, held = (
        open_pixels(name, size, split=part, **options) for name, part in ((train, split), (heldout, heldout_split))
    )
    if both := data.shared_with(held):
        logger.warning(
            f"{both} of {len(held)} held-out images are in --data too: figures that the log calls held-out are not "
            "those of new images, give others as --heldout"
        )
    return data, held
