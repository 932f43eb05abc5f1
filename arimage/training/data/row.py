"""Rows: images with captions or classes, or videos with captions, whatever the layout of the data set."""

import io
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
from PIL import Image

from ...media.files import open_image, read_clip, to_rgb
from ...settings.schema import check_encodable


# Ids of classes are below.
MOST_CLASSES = 2**40
# Between the captions of a row that has several: ASCII's separator of records.
SEPARATOR = "\x1e"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file of a data set: its path relative to that, with "/", its bytes, and its time (`st_mtime_ns`)."""

    name: str
    size: int
    modified: int


def data_file(root: Path, name: str) -> DataFile:
    """What says whether a file has changed."""
    try:
        found = (root / name).stat()
    except OSError as error:
        raise ValueError(f"{root / name} cannot be read ({error.strerror}): restore it, or leave it out") from error
    return DataFile(name, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class Source:
    """Images with captions or classes, or videos with captions.

    Attributes:
        rows: from row `start` on: what errors call the row, its encoded image or video (`bytes`, or a `path`), and its
            caption or class as it is in the data set.
        name: what errors call the data set.
        image, text: the columns of the images or videos, and of their captions or classes; no `text` for videos
            without captions.
        classes: the names of the classes; None for captions, and for classes without names.
        labelled: whether `text` holds classes.
        ids: of the classes whose numbers are in the data set; None if those are the ids.
        files: those that the rows come from, in the order of the rows, then those of captions next to images; none
            for a data set of the Hub.
        revision: that of a data set of the Hub, and the split of it.
        left_out: how many files of a folder are no rows.
    """

    rows: Callable[[int], Iterator[tuple[str, dict[str, Any], Any]]]
    name: str
    image: str
    text: str | None
    classes: list[str] | None = None
    labelled: bool = False
    ids: list[int] | None = None
    files: tuple[DataFile, ...] = ()
    revision: str = ""
    left_out: int = 0

    def read(self, start: int = 0) -> Iterator[tuple[str, dict[str, Any], str]]:
        """From row `start` on: what errors call the row, its encoded image or video, and its caption, several with
        `SEPARATOR` between them, or the id of its class in digits.

        Raises:
            ValueError: if a row has no image, no video, no caption or no class, or cannot be read.
        """
        for where, image, text in self.rows(start):
            yield where, image, self.text_of(where, text)

    def text_of(self, where: str, text: Any) -> str:
        """The caption of a row, a text or a list of them, or the id of its class in digits; "" of neither."""
        if self.text is None:
            return ""
        if text is None:
            raise ValueError(f"{where}, has no {self.text}: leave the row out")
        if self.labelled:
            return str(self._class(where, text))
        if isinstance(text, list):
            if not text:
                raise ValueError(f"{where}, has no {self.text}: leave the row out")
            return SEPARATOR.join(caption_of(where, one) for one in text)
        return caption_of(where, text)

    @cached_property
    def _number(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes or [])}

    def _class(self, where: str, label: Any) -> int:
        if isinstance(label, str) and label in self._number:
            return self._number[label]
        shown = reprlib.repr(label)
        if isinstance(label, str) and not (label.isascii() and label.isdigit()):
            raise ValueError(f"{where}, has the class {shown}: give a file of the names of the classes")
        whole = isinstance(label, str) or (isinstance(label, float) and label.is_integer())
        if isinstance(label, bool) or not (whole or isinstance(label, int)):
            raise ValueError(f"{where}, has the class {shown}: give an id, a whole number, or a name")
        # More digits than any id has are not converted.
        number = int(label) if not isinstance(label, str) or len(label) < 20 else MOST_CLASSES
        known = self.ids if self.ids is not None else self.classes
        if not 0 <= number < (MOST_CLASSES if known is None else len(known)):
            last = f"the last class, {len(known) - 1}" if known else "the last class"
            raise ValueError(f"{where}, has the class {shown}: give ids from 0 to {last}")
        return number if self.ids is None else self.ids[number]


def caption_of(where: str, text: Any) -> str:
    """A caption of a row, without blanks around it."""
    if not isinstance(text, str):
        raise ValueError(f"{where}, has the caption {reprlib.repr(text)}, which is not a text: write a text")
    if not text.strip():
        raise ValueError(f"{where}, has an empty caption: leave the row out")
    check_encodable(f"caption of {where}", text)
    return text.replace(SEPARATOR, " ").strip()


def matched_classes(data: str, found: list[str], given: list[str]) -> list[int]:
    """The ids of the classes of a data set in a list that a user gives: by name, or, where the list has none of these
    names, by place, as of folders with numbers whose names are in the list."""
    number = {name: one for one, name in enumerate(given)}
    missing = [name for name in found if name not in number]
    if not missing:
        return [number[name] for name in found]
    if len(missing) < len(found):
        raise ValueError(f"{data} has the class {missing[0]!r}, which is not in --classes: add it")
    if len(given) != len(found):
        raise ValueError(f"{data} has {len(found)} classes, and --classes has {len(given)}: give one name for each")
    return list(range(len(found)))


def decode(where: str, image: dict[str, Any]) -> Image.Image:
    """A row's image, the bytes of a file or its path, in mode RGB; see `to_rgb`.

    Raises:
        ValueError: if it cannot be read.
    """
    content = content_of(image)
    return to_rgb(where, open_image(where, content if isinstance(content, Path) else io.BytesIO(content)))


def decode_clip(where: str, video: dict[str, Any], count: int, fps: int) -> list[Image.Image]:
    """The first `count` frames of a row's video, the bytes of a file or its path; see `read_clip`.

    Raises:
        ValueError: if it cannot be read.
    """
    return read_clip(where, content_of(video), count, fps)


def content_of(file: dict[str, Any]) -> Path | bytes:
    """The bytes of a row's file, or its path on this machine."""
    if file["bytes"] is not None:
        return file["bytes"]
    if "://" not in file["path"]:
        return Path(file["path"])
    # Single files in a repository of the Hub.
    with fsspec.open(file["path"], "rb") as opened:
        return opened.read()  # pyright: ignore[reportAttributeAccessIssue] it is one file
