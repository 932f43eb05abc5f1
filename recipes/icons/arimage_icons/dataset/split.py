"""Which pictures are trained on, and which are held out."""

from collections import Counter, defaultdict
from collections.abc import Container
from itertools import combinations

import numpy as np

from .choose import Icon


# `val` has so many pictures, or a fiftieth of them if these are fewer.
VAL = 600
# A caption is used if training has so many pictures of it.
LEAST_DESIGNS = 8
# One in so many names of two words is held out as a composition, of those with so many designs both words of which are
# in so many other captions.
COMPOSITIONS, DESIGNS_OF_COMPOSITION, OTHER_CAPTIONS = 20, 4, 5


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


def unlike_others(icons: list[Icon], pixels: np.ndarray, left_out: Counter[str]) -> np.ndarray:
    """Which icons are in a set that is held out, or no near copy of another one with their caption. `left_out` gets
    the count of the others."""
    used = np.ones(len(icons), bool)
    by_caption: defaultdict[str, list[int]] = defaultdict(list)
    for number, icon in enumerate(icons):
        if icon.split == "train":
            by_caption[icon.caption].append(number)
    for numbers in by_caption.values():
        used[numbers] = ~near_copies(pixels[numbers])
    left_out["that are near copies"] += int((~used).sum())
    return used


def of_held_out_sets(icons: list[Icon]) -> np.ndarray:
    return np.array([icon.split == "test" for icon in icons], bool)


def split(
    icons: list[Icon], pixels: np.ndarray, left_out: Counter[str]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The places of the pictures of each split in `icons`, in order, and the label of each caption. `left_out` gets
    the count of those that are in none."""
    used, test = unlike_others(icons, pixels, left_out), of_held_out_sets(icons)
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


def compositions(counts: Counter[str], names: Container[str]) -> list[str]:
    """The captions of two words that are held out, always the same ones, given how many icons of training each caption
    has. None of `names`, which other models have learned."""
    others = Counter(word for caption in counts for word in caption.split())
    possible = [
        caption
        for caption, count in sorted(counts.items())
        if len(set(caption.split())) == caption.count(" ") + 1 == 2
        and caption not in names
        and count >= DESIGNS_OF_COMPOSITION
        and all(others[word] > OTHER_CAPTIONS for word in caption.split())
    ]
    chosen = np.random.default_rng(2).choice(len(possible), len(possible) // COMPOSITIONS, replace=False)
    return [possible[place] for place in sorted(chosen)]


def split_by_words(
    icons: list[Icon], pixels: np.ndarray, val: Container[Icon], names: Container[str], left_out: Counter[str]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """`split` of icons that are chosen by their words: `val` has the icons that it has there, `compositions` those of
    `compositions(...)`, and `test` those of the sets that are held out. Training has none whose caption has both words
    of a composition, in any order and with any others."""
    used, test = unlike_others(icons, pixels, left_out), of_held_out_sets(icons)
    held = np.array([icon in val for icon in icons], bool)
    seen = Counter(icons[number].caption for number in np.flatnonzero(used & ~test & ~held))
    captions = compositions(seen, names)
    pairs = {frozenset(caption.split()) for caption in captions}
    composed = np.array([frozenset(icon.caption.split()) in pairs for icon in icons], bool)
    more = np.array([has_pair(icon.caption, pairs) for icon in icons], bool) & ~composed & ~test & ~held
    left_out["whose captions have both words of a composition and others"] += int((used & more).sum())
    used &= ~more
    masks = {
        "train": used & ~test & ~held & ~composed,
        "val": used & held,
        "test": used & test & ~composed,
        "compositions": used & composed,
    }
    found = sorted({icons[number].caption for number in np.flatnonzero(used)})
    labels = {caption: label for label, caption in enumerate(found)}
    return {name: np.flatnonzero(mask) for name, mask in masks.items()}, labels


def has_pair(caption: str, pairs: Container[frozenset[str]]) -> bool:
    """Whether two words of a caption are one of `pairs`."""
    return any(frozenset(pair) in pairs for pair in combinations(caption.split(), 2))
