"""Which pictures are trained on, and which are held out."""

from collections import Counter, defaultdict

import numpy as np

from .choose import Icon


# `val` has so many pictures, or a fiftieth of them if these are fewer.
VAL = 600
# A caption is used if training has so many pictures of it.
LEAST_DESIGNS = 8


def near_copies(pixels: np.ndarray) -> np.ndarray:
    """Which of pictures, uint8 [N, H, W], are near copies of an earlier one that is none: with soft Jaccard of ink,
    sum(a b) / (sum(a a) + sum(b b) - sum(a b)), above 0.85."""
    # Integers, of which float64 holds all, so that no processor decides otherwise.
    ink = 255.0 - pixels.reshape(len(pixels), -1)
    both = ink @ ink.T
    own = both.diagonal()
    near = 20 * both > 17 * (own[:, None] + own - both)
    copies = np.zeros(len(pixels), bool)
    for number in range(1, len(pixels)):
        copies[number] = (near[number, :number] & ~copies[:number]).any()
    return copies


def split(
    icons: list[Icon], pixels: np.ndarray, left_out: Counter[str]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The places of the pictures of each split in `icons`, in order, and the label of each caption. `left_out` gets
    the count of those that are in none."""
    used = np.ones(len(icons), bool)
    test = np.array([icon.split == "test" for icon in icons], bool)
    by_caption: defaultdict[str, list[int]] = defaultdict(list)
    for number, icon in enumerate(icons):
        if icon.split == "train":
            by_caption[icon.caption].append(number)
    for numbers in by_caption.values():
        used[numbers] = ~near_copies(pixels[numbers])
    left_out["that are near copies"] += int((~used).sum())

    seen = np.flatnonzero(used & ~test)
    val = np.zeros(len(icons), bool)
    val[np.random.default_rng(1).choice(seen, min(VAL, len(seen) // 50), replace=False)] = True
    counts = Counter(icons[number].caption for number in seen if not val[number])
    captions = sorted(caption for caption, count in counts.items() if count >= LEAST_DESIGNS)
    labels = {caption: label for label, caption in enumerate(captions)}
    enough = np.array([icon.caption in labels for icon in icons], bool)
    left_out[f"of what fewer than {LEAST_DESIGNS} designs are left"] += int((used & ~enough).sum())
    used &= enough
    masks = {"train": used & ~test & ~val, "val": used & val, "test": used & test}
    return {name: np.flatnonzero(mask) for name, mask in masks.items()}, labels
