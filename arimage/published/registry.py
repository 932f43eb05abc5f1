"""The published checkpoints of all families, by name. No heavy imports: the console command lists them."""

import difflib
from collections.abc import Iterable

from ..families import FAMILIES
from ..pipelines.family import PublishedCheckpoint


PUBLISHED = [checkpoint for family in FAMILIES.values() for checkpoint in family.checkpoints]
# Repositories that cannot generate images here, and what can.
INSTEAD = {name: reason for family in FAMILIES.values() for name, reason in family.instead.items()}


def nearest_names(name: str, names: Iterable[str]) -> str:
    """The three of these names that are most like a wrong one, as a list in a sentence."""
    *most, last = difflib.get_close_matches(name.lower(), list(names), 3, cutoff=0)
    return f"{', '.join(most)} and {last}"


def find_published(name: str) -> PublishedCheckpoint | None:
    """The entry of a name, or of a Hub repository that holds one checkpoint; `None` if there is none.

    Raises:
        ValueError: if the repository holds several, or is known to generate no images here.
    """
    if name in INSTEAD:
        raise ValueError(f"{name} {INSTEAD[name]}")
    found = [entry for entry in PUBLISHED if name in (entry.name, entry.repository)]
    if len(found) > 1:
        raise ValueError(f"{name} holds several models: give one of {', '.join(entry.name for entry in found)}")
    return found[0] if found else None


def size_text(size: float) -> str:
    """A size in bytes in GB of 10^9 bytes, or in MB below 0.1 GB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
