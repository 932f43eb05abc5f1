"""Writes the prompts of `emoji-checks` (emoji-reference/checks.jsonl) from the emoji data set: known
names, paraphrases, and colours, counts and pairs that training leaves out. Objects are those that the checks recognise
in a picture made from their own sprites.

python recipes/emoji/tools/emoji_checks.py --train train.parquet
"""

import argparse
import json
import random
from pathlib import Path

import torch

from arimage.eval.runs.prompts import read_prompts
from arimage_emoji import EMOJI_CHECKS
from arimage_emoji.data.scenes import NOTHING, SceneSettings, arrange, countable, make_scenes, one_coloured
from arimage_emoji.data.wording import noun_of, plural
from arimage_emoji.metrics.colours import COLOURS, recolour
from arimage_emoji.metrics.composition import Judge, check_image
from arimage_emoji.metrics.reference import read_gallery
from arimage_emoji.training.captioned import ImageCaptions, load_captioned_images
from arimage_emoji.training.sentences import NUMBERS, with_article


SIZES = {"known": 400, "colours": 100, "counts": 60, "pairs": 60}
# The data set holds these out already.
SHAPES = {"green heart", "purple heart", "yellow circle", "blue square", "orange square", "blue book"}
PARAPHRASES = Path(__file__).with_name("paraphrases.tsv")


def make_rows(data: ImageCaptions, judge: Judge) -> list[dict]:
    """The rows of the file, the same for the same data."""
    chance = random.Random(0)
    words = make_scenes(data, SceneSettings(grounds=0, counted=False, pairs=0), NOTHING)
    plain = {caption.lower() for captions in words.captions[: len(data)] for caption in captions}
    names_of: dict[str, list[str]] = {}
    for name in judge.names:
        names_of.setdefault(noun_of(name), []).append(name)

    def passes(image: torch.Tensor, row: dict) -> bool:
        return all(check_image(judge, image, row).values())

    known = [
        {"prompt": name, "check": "known", "parts": [[name]]} for name in chance.sample(data.names, SIZES["known"])
    ]
    rows = known + [
        {"prompt": row["prompt"], "check": "paraphrases", "parts": [[row["name"]]]}
        for row in read_prompts(PARAPHRASES)
    ]
    hues = one_coloured(data)
    coloured = [(colour, i) for i in hues for colour in COLOURS]
    chance.shuffle(coloured)
    coloured.sort(key=lambda one: f"{one[0]} {noun_of(data.names[one[1]])}" not in SHAPES)
    seen: dict[str, int] = {}
    for colour, i in coloured:
        noun = noun_of(data.names[i])
        text = f"{colour} {noun}"
        row = {
            "prompt": with_article(text),
            "check": "colours",
            "noun": noun,
            "colour": colour,
            "parts": [names_of[noun]],
        }
        if len(seen) < SIZES["colours"] and noun not in seen and (text not in plain or text in SHAPES):
            if passes(recolour(data.images[i : i + 1], [hues[i]], colour)[0], row):
                seen[noun] = i
                rows.append(row)
    objects = countable(data)
    chance.shuffle(objects)
    counted: set[str] = set()
    for i in objects:
        noun, number = noun_of(data.names[i]), 2 + len(counted) % 3
        text, parts = f"{NUMBERS[number]} {plural(noun)}", [names_of[noun]] * number
        row = {"prompt": text, "check": "counts", "noun": noun, "parts": parts}
        if len(counted) < SIZES["counts"] and noun not in counted and text not in plain:
            if passes(arrange([data.images[i]] * number, [data.alpha[i]] * number)[0], row):
                counted.add(noun)
                rows.append(row)
    paired = 0
    chance.shuffle(objects)
    for i, j in zip(objects[::2], objects[1::2], strict=False):
        nouns = [noun_of(data.names[k]) for k in (i, j)]
        row = {
            "prompt": " and ".join(map(with_article, nouns)),
            "check": "pairs",
            "nouns": nouns,
            "parts": [names_of[noun] for noun in nouns],
        }
        if paired < SIZES["pairs"] and nouns[0] != nouns[1]:
            if passes(arrange([data.images[k] for k in (i, j)], [data.alpha[k] for k in (i, j)])[0], row):
                paired += 1
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", type=Path, default=EMOJI_CHECKS.path)
    arguments = parser.parse_args()
    data = load_captioned_images(arguments.train, 64, ["noto"], skin_tones=False)
    rows = make_rows(data, Judge(*read_gallery()))
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    arguments.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
