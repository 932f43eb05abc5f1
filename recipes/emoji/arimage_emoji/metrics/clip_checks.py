"""The questions of the metric `clip-checks`: what a prompt of `emoji-checks` asks for, among texts that name another
colour, number or object. CLIP, which answers them, had no part in making the training pictures."""

import random
from functools import cache, partial

from arimage.eval.runs.prompts import read_prompts

from .. import EMOJI_CHECKS
from ..data.wording import plural
from ..training.sentences import NUMBERS, with_article
from .colours import COLOURS


# How many texts name another object, in each question about objects.
OTHERS = 9


@cache
def _rows(check: str) -> list[dict]:
    return [row for row in read_prompts(EMOJI_CHECKS.path) if row["check"] == check]


def _nouns(row: dict) -> list[str]:
    return row.get("nouns") or [row["noun"]]


def questions_of(row: dict) -> dict[str, list[str]]:
    """The texts of each question about an image, by its name; the first is the prompt.

    Args:
        row: the fields of its prompt: `prompt`, `check`, `parts` and, as the check has them, `colour`, `noun` or
            `nouns`.

    Raises:
        ValueError: if the check is unknown.
    """
    prompt, check = row["prompt"], row.get("check")
    sample = partial(random.Random(prompt).sample, k=OTHERS)
    if check in ("known", "paraphrases"):
        right = set(row["parts"][0])
        return {check: [prompt, *sample([one["prompt"] for one in _rows(check) if right.isdisjoint(one["parts"][0])])]}
    if check not in ("colours", "counts", "pairs"):
        raise ValueError(f"the prompt {prompt!r} has the check {check!r}: generate with --prompts emoji-checks")
    noun, *second = nouns = _nouns(row)
    others = sample(sorted({one for other in _rows(check) for one in _nouns(other)} - set(nouns)))
    if check == "pairs":
        pairs = [(noun, other) if i % 2 else (other, *second) for i, other in enumerate(others)]
        return {"pairs": [prompt, *(" and ".join(map(with_article, pair)) for pair in pairs)]}
    if check == "colours":
        colours = [with_article(f"{colour} {noun}") for colour in COLOURS if colour != row["colour"]]
        objects = [with_article(f"{row['colour']} {other}") for other in others]
        return {"colours": [prompt, *colours], "coloured-objects": [prompt, *objects]}
    number = NUMBERS[len(row["parts"])]
    numbers = [f"{other} {plural(noun)}" for other in NUMBERS.values() if other != number]
    objects = [f"{number} {plural(other)}" for other in others]
    return {"counts": [prompt, with_article(noun), *numbers], "counted-objects": [prompt, *objects]}
