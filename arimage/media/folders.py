"""Which files of a folder count, how they are found by name, and how a file is replaced whole or not at all."""

import functools
import logging
import os
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .texts import composed


logger = logging.getLogger(__name__)

# Files that `media/files.py` reads; those of animations are images and videos.
IMAGE_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".webp", ".gif", ".bmp"),
    *(".tif", ".tiff", ".avif", ".ppm", ".pgm", ".pbm", ".pnm"),
)
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg"),
    *(".gif", ".webp", ".png"),
)
# What archives and file managers add to folders.
FOREIGN = ("__MACOSX", "Thumbs.db", "desktop.ini")
# Names in a sentence about many files.
NAMED = 5


@dataclass
class Listing:
    """What lies below a folder, in the order of the names: paths relative to it, with "/".

    Attributes:
        files: those with one of the suffixes.
        others: all other files.
        lost: links that lead nowhere or back, and pipes, each with what it is.
    """

    files: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def list_files(folder: Path, suffixes: Collection[str]) -> Listing:
    """The files in a folder and in all folders below it; `suffixes` are lower-case. Links are followed, but for those
    to a folder that they are in. Hidden files and folders are left out, such as `.ipynb_checkpoints`, and what macOS
    adds to archives (`._a.png`, `__MACOSX`). No file is opened."""
    found = Listing()
    places: list[tuple[str, frozenset]] = [("", frozenset())]
    while places:
        prefix, above = places.pop()
        try:
            here = os.stat(folder / prefix)
            entries = list(os.scandir(folder / prefix))
        except OSError as error:
            raise ValueError(
                f"{folder / prefix} cannot be read ({error.strerror}): correct its permissions, or leave it out"
            ) from error
        above |= {(here.st_dev, here.st_ino)}
        for entry in entries:
            name = prefix + entry.name
            if entry.name.startswith(".") or entry.name in FOREIGN:
                continue
            # Unlike those of an entry, these answer for any link.
            linked = entry.is_symlink()
            if os.path.isdir(entry) if linked else entry.is_dir():
                there = entry.stat() if linked else None
                if there and (there.st_dev, there.st_ino) in above:
                    found.lost.append(f"{name} (a link to a folder that it is in)")
                else:
                    places.append((f"{name}/", above))
            elif os.path.isfile(entry) if linked else entry.is_file():
                wanted = os.path.splitext(entry.name)[1].lower() in suffixes
                (found.files if wanted else found.others).append(name)
            else:
                found.lost.append(f"{name} ({'a broken link' if linked else 'not a file'})")
    for names in (found.files, found.others, found.lost):
        # As the lists of their parts, which would take much memory.
        names.sort(key=lambda name: name.replace("/", "\0"))
    return found


def named(names: Sequence[str]) -> str:
    """Some names, the first ones of many."""
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")


def say_left_out(folder: object, names: Sequence[str]) -> None:
    """Count and name the files of a folder that are left out, if there are any, in a warning."""
    if names:
        verb = "file is" if len(names) == 1 else "files are"
        logger.warning("%d %s left out of %s: %s", len(names), verb, folder, named(names))


def finder(folder: Path) -> Callable[[str], Path | None]:
    """A function that finds a file by its path relative to `folder`, or None. Letters with accents may be composed in
    one of the two and decomposed in the other, as macOS writes names."""

    @functools.cache
    def names(place: Path) -> dict[str, Path]:
        return {composed(path.name): path for path in place.iterdir()} if place.is_dir() else {}

    def find(name: str) -> Path | None:
        path: Path | None = folder / name
        if not path.is_file():
            path = folder
            for part in Path(name).parts:
                # "..", and the root of an absolute path, are in no list.
                path = path / part if (path / part).exists() else names(path).get(composed(part))
                if path is None:
                    return None
        return path if path.is_file() else None

    return find


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file in the folder of `path`, of the same suffix, to write to. It takes the place of `path` at the end; if
    writing fails, what was there before stays."""
    temporary = path.with_name(f".{secrets.token_hex(8)}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
