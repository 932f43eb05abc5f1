"""The motions of emoji in videos, the emoji that move, and the words for both. No heavy imports."""

import re
from collections.abc import Iterable
from itertools import product


# The words for each motion, the plainest first.
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

# What moves: simple, well-known objects.
CAST = (
    "red heart", "red apple", "banana", "tangerine", "tomato", "pizza", "hamburger", "doughnut", "birthday cake",
    "soft ice cream", "mushroom", "french fries", "slightly smiling face", "grinning face", "face with tears of joy",
    "crying face", "enraged face", "smiling face with heart-eyes", "smiling face with sunglasses",
    "smiling face with horns", "clown face", "skull", "ghost", "alien", "alien monster", "robot", "jack-o-lantern",
    "pile of poo", "cat face", "dog face", "fox", "panda", "frog", "pig face", "monkey face", "mouse face",
    "rabbit face", "tiger face", "unicorn", "bear", "fish", "tropical fish", "whale", "shark", "turtle", "butterfly",
    "lady beetle", "bird", "dove", "elephant", "T-Rex", "automobile", "taxi", "police car", "fire engine",
    "delivery truck", "bicycle", "rocket", "airplane", "sailboat", "locomotive", "house", "castle", "deciduous tree",
    "evergreen tree", "palm tree", "cactus", "rose", "tulip", "sunflower", "four leaf clover", "sun", "crescent moon",
    "star", "cloud", "fire", "snowman without snow", "umbrella", "soccer ball", "trophy", "crown", "gem stone",
    "light bulb", "key", "wrapped gift", "balloon", "closed book", "pencil", "scissors", "guitar", "camera",
    "television", "mobile phone", "alarm clock", "hot beverage", "high voltage",
)  # fmt: skip


def phrases(motions: Iterable[str]) -> list[str]:
    """The phrases for one or two motions, the plainest first."""
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
