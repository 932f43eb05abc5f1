"""Rows of shards (.parquet, .arrow, webdataset .tar) and of data sets of the Hugging Face Hub, read by `datasets`."""

import glob
import os
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from .folder import CAPTIONS, LABELS, SHARDS, column_of
from .row import Source, data_file, matched_classes


# Columns that are taken where none is named; the last ones are those of webdataset.
IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "jfif", "gif", "bmp", "tif", "tiff", "avif")
VIDEOS = ("video", "mp4", "webm", "gif", "webp", "mov", "mkv", "avi", "m4v", "mpg", "mpeg")

Rows = Callable[[int], Iterator[tuple[str, dict[str, Any], Any]]]


@contextmanager
def reading(name: object) -> Iterator[None]:
    """Say in one sentence which file or data set cannot be read."""
    try:
        yield
    # Readers of tables and archives raise errors of many kinds for damaged files: OSError, those of pyarrow and
    # tarfile, RecursionError, OverflowError.
    except Exception as error:
        cause = error.__cause__ or error
        reason = str(cause).strip().partition("\n")[0] or type(cause).__name__
        raise ValueError(f"{name} cannot be read ({reason}): get it again, or correct it") from error


def pattern_of(path: Path) -> str:
    """A pattern of `datasets` for this one file."""
    return glob.escape(str(path.absolute()))


def has_rows(path: Path) -> bool:
    """Whether a shard has rows, as far as that is known without reading it."""
    with reading(path):
        if path.suffix.lower() == ".parquet":
            return pq.read_metadata(path).num_rows > 0
        with path.open("rb") as file:
            head, size = file.read(512), file.seek(0, 2)
            file.seek(max(0, size - 1024))
            tail = file.read()
        if path.suffix.lower() == ".arrow":
            if not tail.endswith((b"\xff\xff\xff\xff\0\0\0\0", b"ARROW1")):
                raise ValueError("it ends too soon")
        elif head[257:262] == b"ustar" and any(tail):
            raise ValueError("it ends too soon")
        # An archive without files begins with its end.
        return not (size >= 1024 and not any(head))


def load_rows(kind: str, name: object, *, split: str, streaming: bool, **files: Any) -> tuple[Any, list[str]]:
    """The rows of a data set, as `datasets` loads them, and the names of their columns.

    Raises:
        ValueError: if it cannot be opened.
    """
    import datasets

    with reading(name):
        rows = datasets.load_dataset(kind, split=split, streaming=streaming, **files)
        return rows, list(rows.features or next(iter(rows)))


def open_shards(
    data: str,
    paths: list[Path],
    *,
    videos: bool,
    captions: bool,
    split: str,
    image: str | None,
    caption: str | None,
    label: str | None,
    classes: list[str] | None,
    left_out: int,
) -> Source:
    """Rows of shards, one shard after the other, or of a data set of the Hub if there are no `paths`; see
    `open_source`."""
    full = next((path for path in paths if has_rows(path)), None)
    if paths and full is None:
        raise ValueError(f"{data} has no rows: give another data set")
    rows, columns = open_shard(full or data, split)
    found = column_of(data, columns, image, VIDEOS if videos else IMAGES, "video" if videos else "image")
    if videos and captions and columns == [found]:
        raise ValueError(f"{data} has videos without captions: add a metadata.jsonl (file_name, text)")
    labelled = not videos and (label is not None or (caption is None and not set(columns) & set(CAPTIONS)))
    usual, option = (LABELS, "label") if labelled else (CAPTIONS, "caption")
    text = column_of(data, columns, label or caption, usual, option) if captions or not videos else None
    names = _names(rows, text) if labelled else None
    ids = None if names is None or classes is None else matched_classes(data, names, classes)
    source = Source(_one(data, rows, found, text), data, found, text, classes or names, labelled, ids)
    if full is None:
        import datasets

        with reading(data):
            return replace(source, revision=f"{datasets.load_dataset_builder(data).hash}, {split}")
    root = Path(data) if Path(data).is_dir() else paths[0].parent
    files = tuple(data_file(root, Path(os.path.relpath(path, root)).as_posix()) for path in paths)
    return replace(source, rows=_several(paths, found, text, names), files=files, left_out=left_out)


def open_shard(data: Path | str, split: str = "train") -> tuple[Any, list[str]]:
    """The rows of one shard, or of a data set of the Hub, and their columns; see `load_rows`."""
    if isinstance(data, str):
        return load_rows(data, data, split=split, streaming=True)
    kind = SHARDS[data.suffix.lower()]
    return load_rows(kind, data, split="train", streaming=True, data_files=[pattern_of(data)])


def _names(rows: Any, column: str | None) -> list[str] | None:
    return getattr((rows.features or {}).get(column), "names", None)


def _several(paths: list[Path], image: str, text: str | None, names: list[str] | None) -> Rows:
    def rows(start: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
        for path in filter(has_rows, paths):
            count = pq.read_metadata(path).num_rows if path.suffix.lower() == ".parquet" else None
            if count is not None and start >= count:
                start -= count
                continue
            found, columns = open_shard(path)
            lacking = next((name for name in (image, text) if name is not None and name not in columns), None)
            if lacking is not None:
                raise ValueError(
                    f"{path} has the columns {', '.join(columns)}, and other shards have {lacking}: leave it out"
                )
            if _names(found, text) not in (None, names):
                raise ValueError(f"{path} has other names of classes than other shards: leave it out")
            number = 0
            for number, row in enumerate(_one(str(path), found, image, text, path.parent)(0), 1):
                if number > start:
                    yield row
            start = max(0, start - number)

    return rows


def check_shards(paths: list[Path], image: str) -> None:
    """Read the images of shards one by one.

    Raises:
        ValueError: naming the shard, and the row, that cannot be read.
    """
    for _ in _several(paths, image, None, None)(0):
        pass


def _one(name: str, rows: Any, image: str, text: str | None, folder: Path | None = None) -> Rows:
    """The rows of one shard, whose paths are relative to `folder`, or of a data set of the Hub."""
    import datasets

    kept = rows.select_columns([image] if text is None else [image, text])
    feature = (rows.features or {}).get(image)
    if isinstance(feature, datasets.Image | datasets.Video):
        kept = kept.cast_column(image, type(feature)(decode=False))

    def of(start: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
        found, number = iter(kept.skip(start) if start else kept), start
        while True:
            where = f"{name}, row {number + 1}"
            with reading(where):
                row = next(found, None)
            if row is None:
                return
            yield where, encoded(where, image, row[image], folder), row.get(text)
            number += 1

    return of


def encoded(where: str, column: str, value: Any, folder: Path | None) -> dict[str, Any]:
    """The image or video of a row, as `bytes`, or a `path` that is there."""
    if isinstance(value, bytes):
        return {"bytes": value, "path": None}
    file = value if isinstance(value, dict) else {"path": value}
    if isinstance(file.get("bytes"), bytes):
        return file
    path = file.get("path")
    if value is None or (isinstance(value, dict) and path is None):
        raise ValueError(f"{where}, has no {column}: leave the row out")
    if not isinstance(path, str):
        raise ValueError(
            f"{where}, has {reprlib.repr(value)} as {column}, which is no file of an image: name another column, or "
            "leave the row out"
        )
    if folder is not None and not (folder / path).is_file():
        raise ValueError(f"{where}, names {path}, which is not in {folder}: get the file, or leave the row out")
    return {"bytes": None, "path": path if folder is None else str(folder / path)}
