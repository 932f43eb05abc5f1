"""Which files of a folder count, how they are found by name, and how a file is replaced whole or not at all."""

import functools
import os
import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from .texts import composed


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def visible_files(folder: Path, suffixes: Collection[str], pattern: str = "**/*") -> list[Path]:
    """The files in a folder that match a pattern, by default all below it, with one of the lower-case `suffixes`,
    sorted. Hidden files and folders are left out, such as `.ipynb_checkpoints`, and what macOS adds to archives
    (`._a.png`, `__MACOSX`)."""

    def counts(path: Path) -> bool:
        parts = path.relative_to(folder).parts
        return (
            path.suffix.lower() in suffixes
            and not any(part.startswith(".") or part == "__MACOSX" for part in parts)
            and path.is_file()
        )

    return sorted(filter(counts, folder.glob(pattern)))


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
