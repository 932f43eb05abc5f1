"""How far a run is, and how long the rest takes."""

import sys

from tqdm import tqdm


def progress_bar(**options) -> tqdm:
    """A tqdm bar that is updated every 0.1 s on a terminal and every 30 s in a log."""
    return tqdm(**options, mininterval=0.1 if sys.stderr.isatty() else 30)


def duration_text(seconds: float) -> str:
    """Seconds, or minutes or hours if they are at least one."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= size:
            return f"{seconds / size:.2g} {unit}"
    return f"{seconds:.2g} seconds"


def tell_left(progress: tqdm, seconds: float) -> None:
    """Say once, above the bar, how long the images that are missing will take, if there are any."""
    if seconds:
        progress.write(f"about {duration_text(seconds)} for the other images", file=sys.stderr)
