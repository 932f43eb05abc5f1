"""How emoji move in videos: the motions, and the words for them. No heavy imports."""

import re
from collections.abc import Iterable
from itertools import product


# Each motion with the words for it, the plainest first.
MOTIONS = {
    "right": ("moving right", "moving to the right"),
    "left": ("moving left", "moving to the left"),
    "up": ("moving up", "rising"),
    "down": ("moving down", "falling"),
    "growing": ("growing", "getting bigger"),
    "shrinking": ("shrinking", "getting smaller"),
    "spinning": ("spinning", "rotating"),
    "bouncing": ("bouncing", "jumping"),
}
_DIRECTIONS, _OTHERS = ("right", "left", "up", "down"), ("growing", "shrinking", "spinning")
PAIRS = (*product(_DIRECTIONS, _OTHERS), ("growing", "spinning"), ("shrinking", "spinning"))
# What one video shows: one motion, or two at once.
COMBINATIONS = (*((motion,) for motion in MOTIONS), *PAIRS)


def phrases(motions: Iterable[str]) -> list[str]:
    """How to say these motions, the plainest first."""
    first, *second = (MOTIONS[motion] for motion in motions)
    if not second:
        return list(first)
    pairs = list(product(first, second[0]))
    return [f"{a} and {b}" for a, b in pairs] + [f"{b} and {a}" for a, b in pairs]


def motions_in(caption: str) -> tuple[str, ...]:
    """The motions that a caption asks for, in the order of `MOTIONS`."""
    words = caption.casefold()
    return tuple(
        motion for motion, texts in MOTIONS.items() if any(re.search(rf"\b{text}\b", words) for text in texts)
    )


def without_motions(caption: str) -> str:
    """What a caption such as "a red heart, moving right" asks for, without how it moves."""
    starts = [
        match.start()
        for texts in MOTIONS.values()
        for text in texts
        if (match := re.search(rf"\b{text}\b", caption.casefold()))
    ]
    return caption[: min(starts, default=len(caption))].rstrip(" ,")
