"""Parts of a data set: splits that files are named after, as on the Hugging Face Hub, and slices of them."""

import logging
import re
from pathlib import PurePosixPath

from ...media.folders import say_left_out


logger = logging.getLogger(__name__)

# Whole words, as the Hub reads them.
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF_WORD = {word: split for split, words in SPLITS.items() for word in words}
WORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(SPLIT_OF_WORD)})(?=[-._ 0-9]|$)")


def base_of(split: str) -> str:
    """The split that a slice such as "train[:10]" is of."""
    return re.split(r"[\[+ ]", split)[0]


def part_of(data: str, split: str, count: int) -> range | list[int]:
    """The numbers of the rows in a slice such as "train[:1000]" or "train[:10%]", of `count` rows in the split."""
    base = base_of(split)
    if split == base:
        return range(count)
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute({base: count})
    except (ValueError, AssertionError) as error:
        raise ValueError(f"the split {split!r} of {data} cannot be taken ({error}): write {base}[:{count}]") from error
    numbers = [number for part in parts for number in range(part.from_, part.to)]
    if not numbers:
        raise ValueError(f"the split {split!r} of {data} has no rows, of {count}: write {base}[:{count}]")
    return numbers


def split_of_shard(name: str) -> str | None:
    """The split that a shard is named after: by a folder of that name, or a word of its own in its name."""
    *folders, file = PurePosixPath(name.lower()).parts
    found = WORD.search(file.rpartition(".")[0])
    by_folder = [SPLIT_OF_WORD[folder] for folder in folders if folder in SPLIT_OF_WORD]
    return SPLIT_OF_WORD[found[1]] if found else (by_folder or [None])[-1]


def chosen_shards(data: str, names: list[str], split: str, pattern: bool) -> list[str]:
    """Those of the shards of a folder or `pattern` that belong to a split, if they are of several. What is left out
    is counted and named in a warning."""
    base = base_of(split)
    splits = {name: split_of_shard(name) for name in names}
    present = sorted({one for one in splits.values() if one is not None})
    wanted = SPLIT_OF_WORD.get(base.lower(), base)
    if None in splits.values():
        odd = next((name for name, one in splits.items() if one not in (None, "train")), None)
        if odd is not None and not pattern:
            other = next(name for name, one in splits.items() if one is None)
            raise ValueError(
                f"{data} has {odd}, which is named after a split, and {other}, which is not: give those to be read as "
                "a pattern, or move the others elsewhere"
            )
        if wanted != "train":
            raise ValueError(f"{data} has no split {base!r}: leave it out, or name the shards after splits")
        return names
    if wanted not in present:
        if wanted != "train" or len(present) > 1:
            raise ValueError(f"{data} has the splits {', '.join(present)}, not {base!r}: name one with --split")
        wanted = present[0]
        logger.warning("the shards of %s are of the split %r, which is read: there is no other", data, wanted)
    say_left_out(f"the split {wanted!r} of {data}", [name for name in names if splits[name] != wanted])
    return [name for name in names if splits[name] == wanted]
