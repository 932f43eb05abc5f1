"""Data sets of every layout: which files they have, a folder, shards, or one of the Hugging Face Hub, and their rows.
Nothing is guessed from words in names but the split that shards are named after."""

import fnmatch
import glob
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...media.folders import IMAGE_SUFFIXES, Listing, say_left_out
from .folder import SHARDS, list_data, open_folder
from .row import Source
from .shards import open_shards
from .splits import base_of, chosen_shards


@dataclass(frozen=True)
class Found:
    """What a data set is: the files of a folder, or the paths of shards; neither for one of the Hub."""

    folder: Listing | None = None
    shards: list[Path] | None = None
    left_out: int = 0


def find_data(data: str, *, videos: bool = False, split: str = "train") -> Found:
    """Which files a data set has; none is opened."""
    if not data:
        raise ValueError("--data is empty: give a folder, shards or a data set of the Hub")
    path = Path(data)
    if path.is_dir():
        listing, shards = list_data(path, videos)
        if not shards:
            return Found(listing)
        rest = [*listing.others, *listing.lost]
        say_left_out(data, rest)
        kept = chosen_shards(data, shards, split, pattern=False)
        return Found(None, [path / name for name in kept], len(rest) + len(shards) - len(kept))
    if path.suffix.lower() in SHARDS:
        return Found(None, _matching(data, split))
    if path.exists() or data.count("/") > 1 or path.suffix.lower() in IMAGE_SUFFIXES:
        raise ValueError(f"{data} is not a data set: give a folder, shards ({', '.join(SHARDS)}) or one of the Hub")
    return Found()


def _matching(data: str, split: str) -> list[Path]:
    """The shards that a pattern names, or one of them by its name."""
    path = Path(data)
    if path.is_file():
        if base_of(split) != "train":
            raise ValueError(f"{data} has no split {base_of(split)!r}: leave out --split")
        return [path]
    # The name of a folder is no pattern.
    if path.parent.is_dir():
        root = path.parent
        visible = sorted(one.name for one in root.iterdir() if not one.name.startswith("."))
        names = [name for name in visible if fnmatch.fnmatchcase(name, path.name)]
    else:
        root, names = Path(), sorted(glob.glob(data, recursive=True))
    if not names:
        raise ValueError(f"{data} names no file: give a folder, shards or a data set of the Hub")
    lost = next((root / name for name in names if not (root / name).is_file()), None)
    if lost is not None:
        raise ValueError(f"{lost} is not a file, or a broken link: restore it, or give a pattern without it")
    return [root / name for name in chosen_shards(data, names, split, pattern=True)]


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
    """Open a data set. Images are not read; files of a folder that are no rows are counted and named in a warning.

    Args:
        data: a folder with one folder of images per class, or with images or videos and a metadata.jsonl
            or .csv (`file_name`, and `text` or another field) or a NAME.txt next to each; a folder or a pattern
            (`shards/*.tar`) of .parquet, .arrow or webdataset .tar files; or the id of a data set of the Hugging Face
            Hub. All files below a class's folder belong to it, and links are followed.
        videos: whether it has videos with captions, not images.
        captions: whether captions are read; False for videos without.
        split: of a data set of the Hub, of shards that are named after splits, or of a folder with folders such as
            train and val; also a part of a folder, as in "train[:100]".
        image, caption, label: the columns; by default the first of `IMAGES` or `VIDEOS`, and of `CAPTIONS` or
            `LABELS`.
        classes: the names of the classes in the order of their ids: of the data set's own names, or in place of those.

    Raises:
        ValueError: if the data set does not exist, lacks a column, or has another layout.
    """
    if caption is not None and label is not None:
        raise ValueError("caption and label are both given, and images have captions or classes: give one of the two")
    if videos and label is not None:
        raise ValueError("label is given, and models of videos read captions: give caption")
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice:
        raise ValueError(f"--classes names {twice[0]!r} twice: give each class once")
    given = {"videos": videos, "captions": captions, "split": split, "caption": caption, "label": label}
    found = find_data(data, videos=videos, split=split)
    if found.folder is None:
        if found.shards and split != base_of(split):
            raise ValueError(f"--split is {split}, a part, and shards are read whole: give --limit, or fewer shards")
        return open_shards(data, found.shards or [], image=image, classes=classes, left_out=found.left_out, **given)
    if image is not None:
        option = "--video" if videos else "--image"
        raise ValueError(f"{option} names a column, and {data} is a folder of files: leave it out")
    return open_folder(data, found.folder, classes=classes, **given)
