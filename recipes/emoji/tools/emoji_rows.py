"""The rows of the emoji data set without their pictures: which emoji of which style, their captions and their split.

The rules are those of the data set that the packaged models were trained on, odd ones included: other captions or
splits would be another data set.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


TONES = [f"{tone} skin tone" for tone in ("light", "medium-light", "medium", "medium-dark", "dark")]
FIRST_TONE = 0x1F3FB
# A variation selector and the joiner: file names leave them out, each source in its own way.
INVISIBLE = ("fe0f", "200d")

COLOUR_SHAPES = {
    *("purple heart", "green heart", "brown heart", "yellow circle", "brown circle"),
    *("blue square", "orange square", "blue book"),
}

# "men" also takes the article from "mending heart" and "menorah".
NO_ARTICLE = ("1st", "2nd", "3rd", "flag ", "handshake", "keycap ", "men", "no ", "people", "women")


@dataclass(frozen=True)
class Style:
    """How a style is called in captions, and where a clone keeps its pictures."""

    words: tuple[str, str]
    folder: str
    suffix: str
    license: str


# In the order of the rows.
STYLES = {
    "noto": Style(("noto", "glossy"), "png/128", ".png", "Apache-2.0 / OFL-1.1 (see README)"),
    "blob": Style(("blob", "blob"), "png/128", ".png", "Apache-2.0 (see README)"),
    "twemoji": Style(("flat", "twemoji"), "assets/svg", ".svg", "CC-BY-4.0"),
}
ANNOTATIONS = [
    "cldr-json/cldr-annotations-full/annotations/en/annotations.json",
    "cldr-json/cldr-annotations-derived-full/annotationsDerived/en/annotations.json",
]


@dataclass(frozen=True)
class Emoji:
    """An emoji of any style. `key` and `base` are code points without invisible ones; the base has no skin tone."""

    codepoints: str
    key: str
    base: str
    name: str
    base_name: str
    keywords: list[str]
    group: str
    subgroup: str
    siblings: int

    @property
    def skin_tones(self) -> list[str]:
        points = [int(point, 16) - FIRST_TONE for point in self.key.split("-")]
        return [TONES[point] for point in points if point in range(len(TONES))]

    @property
    def untoned_key(self) -> str:
        points = self.key.split("-")
        return "-".join(point for point in points if int(point, 16) - FIRST_TONE not in range(len(TONES)))


def key_of(codepoints: str) -> str:
    """Code points in lower case and without leading zeros and invisible ones."""
    points = codepoints.lower().split("-")
    return "-".join(f"{int(point, 16):x}" for point in points if point not in INVISIBLE)


def read_source(folder: Path, path: str, option: str) -> Any:
    """A JSON file of a clone.

    Raises:
        ValueError: if the clone does not hold it.
    """
    if not (folder / path).is_file():
        raise ValueError(f"{folder} holds no {path}: give the clone that REPRODUCE.md names for {option}")
    return json.loads((folder / path).read_text(encoding="utf-8"))


def read_names(cldr: Path) -> dict[str, tuple[str, list[str]]]:
    """Name and keywords by key."""
    names = {}
    for path in ANNOTATIONS:
        annotations, *_ = read_source(cldr, path, "--cldr").values()
        for text, entry in annotations["annotations"].items():
            if "tts" in entry:
                key = key_of("-".join(f"{ord(character):x}" for character in text))
                names[key] = entry["tts"][0], entry.get("default", [])
    return names


def read_emoji(twemoji: Path, emojibase: Path, cldr: Path) -> dict[str, Emoji]:
    """All emoji by key, without regional indicators, which belong to no group.

    Raises:
        ValueError: if CLDR has no name for one.
    """
    names = read_names(cldr)
    titles = read_source(emojibase, "packages/data/meta/groups.json", "--emojibase")
    found = {}
    for base in read_source(twemoji, "emojibase.data.json", "--twemoji"):
        skins = base.get("skins", [])
        for entry in [base, *skins] if "group" in base else []:
            codepoints, key, base_key = entry["hexcode"].lower(), key_of(entry["hexcode"]), key_of(base["hexcode"])
            unnamed = sorted({key, base_key} - names.keys())
            if unnamed:
                raise ValueError(
                    f"CLDR has no English name for {unnamed[0]}: check out the commits that REPRODUCE.md names"
                )
            name, keywords = names[key]
            found[key] = Emoji(
                codepoints=codepoints,
                key=key,
                base=base_key,
                name=name,
                base_name=names[base_key][0],
                keywords=[word for word in keywords if word.lower() != name.lower() and "skin tone" not in word],
                group=titles["groups"][str(entry["group"])],
                subgroup=titles["subgroups"][str(entry["subgroup"])],
                siblings=1 + len(skins),
            )
    return found


def phrase_of(name: str) -> str:
    """A CLDR name as a phrase: "man: red hair" is a man with red hair."""
    head, colon, rest = name.partition(": ")
    if not colon:
        return name
    if head in ("flag", "keycap"):
        return f"flag of {rest}" if head == "flag" else f"keycap {rest}"
    return f"{head} with {rest.replace(', ', ' and ')}"


def with_article(phrase: str) -> str:
    """The phrase after "a" or "an", unless it begins or ends as a plural does."""
    if phrase.startswith(NO_ARTICLE) or (phrase.endswith("s") and not phrase.endswith("ss")):
        return phrase
    return f"an {phrase}" if phrase[0].lower() in "aeiou" else f"a {phrase}"


def captions_of(emoji: Emoji, style: str) -> list[str]:
    """Five to eight captions; the second one is the primary one."""
    first, second = STYLES[style].words
    phrase = phrase_of(emoji.name)
    captions = [
        phrase,
        f"{phrase}, {first} style",
        f"{with_article(phrase)}, {second} style",
        f"an emoji of {with_article(phrase)}",
        f"{first} emoji: {phrase}",
    ]
    if emoji.keywords:
        captions.append(", ".join(emoji.keywords[:4]))
        captions.append(f"{phrase} ({', '.join(emoji.keywords[:2])}), {second} style")
    # A swatch of a skin tone has no colon in its name.
    if len(emoji.skin_tones) == 1 and ":" in emoji.name:
        captions.append(f"{emoji.skin_tones[0]} {emoji.name.partition(':')[0]}, {first} style")
    return captions


def number_of(purpose: str, text: str) -> int:
    """A number that decides about a text. It is the same everywhere, unlike that of a random generator."""
    return int(hashlib.sha1(f"{purpose}{text}".encode()).hexdigest(), 16)


def split_of(emoji: Emoji, style: str) -> str:
    """ "train", or why the row is held out. Of several reasons the first one counts."""
    tones, untoned = emoji.skin_tones, emoji.untoned_key
    if emoji.name in COLOUR_SHAPES:
        return "heldout_color_shape"
    if len(tones) == 1 and untoned and number_of("t", untoned) % 3 == 0:
        if TONES[number_of("u", untoned) % 5] == tones[0]:
            return "heldout_skin_tone"
    if len(tones) == 2 and number_of("v", emoji.key) % 12 == 0:
        return "heldout_two_tone"
    person = re.fullmatch("(man|woman) ([^:]+)", emoji.base_name)
    if person is not None and number_of("g", person[2]) % 6 == 0:
        if ("woman", "man")[number_of("w", person[2]) % 2] == person[1]:
            return "heldout_gender_role"
    if not tones and emoji.group not in ("flags", "component") and number_of("s", emoji.key) % 14 == 0:
        if list(STYLES)[number_of("q", emoji.key) % 3] == style:
            return "heldout_style"
    return "train"


def describe(emoji: Emoji, style: str) -> dict:
    """The columns of a row that are not pictures."""
    captions = captions_of(emoji, style)
    return {
        "caption": captions[1],
        "captions": captions,
        "name": emoji.name,
        "keywords": emoji.keywords,
        "style": style,
        "codepoints": emoji.codepoints,
        "group": emoji.group,
        "subgroup": emoji.subgroup,
        "base": emoji.base,
        "skin_tones": emoji.skin_tones,
        # Otherwise people, each in six or 26 skin tones, would be most of a sample.
        "weight": 1 / math.sqrt(emoji.siblings),
        "license": STYLES[style].license,
        "split": split_of(emoji, style),
    }


def list_rows(clones: dict[str, Path], emojibase: Path, cldr: Path) -> Iterator[tuple[Path, dict]]:
    """The rows of both splits in order, and the file of the picture of each. Files of other pictures are left out.

    Args:
        clones: a folder per style.

    Raises:
        ValueError: if a folder does not hold what it should.
    """
    emoji = read_emoji(clones["twemoji"], emojibase, cldr)
    for style, kind in STYLES.items():
        folder = clones[style] / kind.folder
        files = sorted(folder.glob(f"*{kind.suffix}"), key=lambda path: path.name)
        if not files:
            option = "--blobmoji" if style == "blob" else f"--{style}"
            raise ValueError(
                f"{folder} holds no {kind.suffix} files: give the clone that REPRODUCE.md names for {option}"
            )
        for file in files:
            key = key_of(file.stem.removeprefix("emoji_u").replace("_", "-"))
            if key in emoji:
                yield file, describe(emoji[key], style)
