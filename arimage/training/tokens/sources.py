"""Images with captions or classes, read one after another by `datasets`: from folders, shards, and data sets of the
Hugging Face Hub."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any

import fsspec
from PIL import Image

from ...media.files import open_image, read_clip, to_rgb
from ...media.folders import IMAGE_SUFFIXES


# Columns that are taken where none is named; the last ones are those of webdataset.
IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp")
VIDEOS = ("video", "mp4", "webm", "gif", "webp", "mov", "mkv", "avi")
CAPTIONS = ("caption", "text", "txt")
LABELS = ("label", "cls")
SHARDS = {".parquet": "parquet", ".tar": "webdataset", ".arrow": "arrow"}


@dataclass(frozen=True)
class DataFile:
    """A file of a data set: its path relative to the data set, its bytes, and when it was changed (st_mtime_ns)."""

    name: str
    size: int
    modified: int


@dataclass(frozen=True)
class Source:
    """Images with captions or classes, or videos with captions.

    Attributes:
        rows: the `datasets.IterableDataset`.
        name: what errors call it.
        image, text: the columns of the images or videos, and of their captions or classes; no `text` for videos
            without captions.
        classes: the names of the classes; None for captions, and for classes without names.
        labelled: whether `text` holds classes.
        files: those that the rows come from, in their order; none for a data set of the Hub.
        revision: that of a data set of the Hub.
    """

    rows: Any
    name: str
    image: str
    text: str | None
    classes: list[str] | None
    labelled: bool
    files: tuple[DataFile, ...] = ()
    revision: str = ""

    def read(self, start: int = 0) -> Iterator[tuple[str, Any, str]]:
        """From row `start` on: what errors call the row, its encoded image or video, and its caption, or the id of
        its class in digits.

        Raises:
            ValueError: if a row has no image, no video, no caption or no class.
        """
        for number, row in enumerate(self.rows.skip(start), start + 1):
            where = f"{self.name}, row {number}"
            for column, value in row.items():
                if value is None:
                    raise ValueError(f"{where}, has no {column}: leave the row out")
            if self.text is None:
                text = ""
            else:
                text = (self._class if self.labelled else _caption)(where, row[self.text])
            yield where, row[self.image], text

    def _class(self, where: str, label: Any) -> str:
        if isinstance(label, str) and not label.isdigit():
            if self.classes is None or label not in self.classes:
                raise ValueError(f"{where}, has the class {label!r}: give a file of the names of the classes")
            return str(self.classes.index(label))
        number = int(label)
        if number < 0 or (self.classes is not None and number >= len(self.classes)):
            raise ValueError(f"{where}, has the class {number}: give ids from 0 to the last class")
        return str(number)


def _caption(where: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}, has an empty caption: leave the row out")
    return text.strip()


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


def open_source(
    data: str,
    *,
    videos: bool = False,
    captions: bool = True,
    split: str = "train",
    image: str | None = None,
    caption: str | None = None,
    label: str | None = None,
    classes: list[str] | None = None,
) -> Source:
    """Open a data set without reading it.

    Args:
        data: a folder with one folder of images per class, or with images or videos and a metadata.jsonl
            (`file_name`, and `text` or another column); a folder or a pattern (`shards/*.tar`) of .parquet, .arrow or
            webdataset .tar files; or the id of a data set of the Hugging Face Hub.
        videos: whether it has videos with captions, not images.
        captions: whether captions are read; False for videos without.
        split: of a data set of the Hub, or of a folder with folders such as train and val.
        image, caption, label: the columns; by default the first of `IMAGES` or `VIDEOS`, and of `CAPTIONS` or
            `LABELS`.
        classes: the names of the classes, where the data set does not have them.

    Raises:
        ValueError: if the data set does not exist, or lacks a column.
    """
    import datasets

    if caption is not None and label is not None:
        raise ValueError("caption and label are both given, and images have captions or classes: give one of the two")
    if videos and label is not None:
        raise ValueError("label is given, and models of videos read captions: give caption")
    kind, files = builder(data, videos)
    rows, columns = load_rows(data, kind, split, streaming=True, **files)
    found = column_of(data, columns, image, VIDEOS if videos else IMAGES, "video" if videos else "image")
    if videos:
        if captions and columns == [found]:
            raise ValueError(f"{data} has videos without captions: add a metadata.jsonl (file_name, text)")
        named = column_of(data, columns, caption, CAPTIONS, "caption") if captions else None
        kept = rows.cast_column(found, datasets.Video(decode=False)).select_columns(
            [found, *([named] if named else [])]
        )
        return Source(kept, data, found, named, None, False, files_of(data))
    features = rows.features
    labelled = label is not None or (caption is None and not set(columns) & set(CAPTIONS))
    named = column_of(
        data, columns, label or caption, LABELS if labelled else CAPTIONS, "label" if labelled else "caption"
    )
    if labelled and classes is None:
        classes = getattr((features or {}).get(named), "names", None)
    rows = rows.cast_column(found, datasets.Image(decode=False)).select_columns([found, named])
    return Source(rows, data, found, named, classes, labelled, files_of(data))


def files_of(data: str) -> tuple[DataFile, ...]:
    path = Path(data)
    found = (
        sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [Path(one) for one in glob(data)]
    )
    return tuple(DataFile(str(one), one.stat().st_size, one.stat().st_mtime_ns) for one in found)


def load_rows(data: str, kind: str, split: str, *, streaming: bool, **files: Any) -> tuple[Any, list[str]]:
    """The rows of a data set, as `datasets` loads them, and the names of their columns. `kind` and `files` are those
    of `builder`.

    Raises:
        ValueError: if it cannot be opened, or is empty.
    """
    import datasets

    try:
        rows = datasets.load_dataset(kind, split=split, streaming=streaming, **files)
        return rows, list(rows.features or next(iter(rows)))
    except StopIteration as error:
        raise ValueError(f"{data} has no rows: give another data set") from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"{data} cannot be opened ({reason}): give a folder, shards or a data set of the Hub"
        ) from error


def builder(data: str, videos: bool = False) -> tuple[str, dict[str, Any]]:
    """What `datasets` loads: a builder and its files, or a data set of the Hub."""
    path = Path(data)
    if path.is_dir():
        for suffix, kind in SHARDS.items():
            if any(path.glob(f"*{suffix}")):
                return kind, {"data_files": str(path / f"*{suffix}")}
        return "videofolder" if videos else "imagefolder", {"data_dir": data}
    if path.suffix in SHARDS:
        return SHARDS[path.suffix], {"data_files": data}
    if path.exists() or data.count("/") > 1 or path.suffix in IMAGE_SUFFIXES:
        raise ValueError(f"{data} is not a data set: give a folder, shards ({', '.join(SHARDS)}) or one of the Hub")
    return data, {}


def column_of(data: str, columns: list[str], given: str | None, usual: tuple[str, ...], option: str) -> str:
    names = usual if given is None else (given,)
    found = next((name for name in names if name in columns), None)
    if found is None:
        raise ValueError(f"{data} has the columns {', '.join(columns)}: name that of its {option}s with --{option}")
    return found
