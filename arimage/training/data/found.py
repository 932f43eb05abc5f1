"""Which files a data set has: a folder, shards, or one of the Hugging Face Hub. Nothing is guessed from words in names
but the split that shards are named after."""

import fnmatch
import glob
from dataclasses import dataclass
from pathlib import Path

from ...media.folders import IMAGE_SUFFIXES, Listing, say_left_out
from .folder import SHARDS, list_data
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
