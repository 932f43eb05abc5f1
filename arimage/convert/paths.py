"""The files that a converter reads and writes. No heavy imports: the console commands check them first."""

from pathlib import Path


class CheckpointError(ValueError):
    """A file that cannot be converted, in one sentence: which file, what is wrong with it, what to do."""


def check_file(path: str | Path) -> None:
    """Raise a `CheckpointError` if `path` is not a file."""
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is not a file: give the path of a published checkpoint")


def check_folder(path: str | Path) -> None:
    """Raise a `CheckpointError` if `path` is not a folder."""
    if not Path(path).is_dir():
        raise CheckpointError(f"{path} is not a folder: give the folder of a published checkpoint")


def check_vacant(out: str | Path | None) -> None:
    """Raise a `CheckpointError` if `out` is a file or a folder with something in it."""
    if out is None:
        return
    out = Path(out)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out} exists already: give a new or empty folder to write to")
