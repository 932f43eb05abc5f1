"""Which icons of the package are used, and what they are called."""

import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path


RULES = tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))
LICENCES, HELD_OUT, STYLE_WORDS, PLAIN_WORDS, BRAND_SETS, BRAND_WORDS = (
    frozenset(RULES[key])
    for key in ("licences", "held_out", "style_words", "plain_words", "brand_sets", "brand_words")
)
LEFT_OUT = {name: reason for reason, names in RULES["left_out"].items() for name in names}
FAMILIES = {name: family for family, names in RULES["families"].items() for name in names}
# A caption is used if so many families have an icon of it, and a word if so many have one whose caption has it.
LEAST_FAMILIES = 8
# The most words of a caption that is used for its words: with those of style a model has to read them.
MOST_WORDS = 4


@dataclass(frozen=True)
class Icon:
    """An icon, before it is drawn. `split` is "test" in a set that is held out, and "train" in others."""

    caption: str
    set: str
    name: str
    split: str
    licence: str
    family: str


def caption_of(name: str) -> str:
    """The words of a name less those of style and numbers."""
    return " ".join(word for word in name.split("-") if word not in STYLE_WORDS and not word.isdecimal())


def in_two_tones(name: str) -> bool:
    """Whether a name says that parts of its icon are grey."""
    words = f" {name.replace('-', ' ')} "
    return any(f" {tones} " in words for tones in RULES["two_tones"])


def why_not(prefix: str, about: dict | None) -> str | None:
    """Why a set is left out, as a part of the report; None if it is used."""
    if about is None:
        return "in sets without a licence"
    if about.get("palette"):
        return "in sets with colours"
    licence = about["license"].get("spdx", about["license"]["title"])
    if licence not in LICENCES:
        return f"with the licence {licence}"
    return f"in sets {LEFT_OUT[prefix]}" if prefix in LEFT_OUT else None


def sets_used(collections: dict[str, dict], names: dict[str, dict[str, bool]], left_out: Counter[str]) -> list[str]:
    """The sets whose icons may be used, in the order of `collections`."""
    used = []
    for prefix, icons in sorted(names.items()):
        if reason := why_not(prefix, collections.get(prefix)):
            left_out[reason] += len(icons)
        else:
            used.append(prefix)
    return sorted(used, key=list(collections).index)


def with_captions(
    collections: dict[str, dict], names: dict[str, dict[str, bool]], left_out: Counter[str]
) -> list[Icon]:
    """The icons of all sets that are used, and their captions. Those with the same words in another order have the
    caption that most of them have."""
    found: list[tuple[str, str, str]] = []
    for prefix in sets_used(collections, names, left_out):
        for name, hidden in names[prefix].items():
            caption = caption_of(name)
            if hidden:
                left_out["hidden by their sets"] += 1
            elif in_two_tones(name):
                left_out["in two tones"] += 1
            elif not caption:
                left_out["without a word of what they show"] += 1
            else:
                found.append((caption, prefix, name))
    orders: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for caption, _, _ in found:
        orders[tuple(sorted(caption.split()))][caption] += 1
    commonest = {words: captions.most_common(1)[0][0] for words, captions in orders.items()}
    return [
        Icon(
            commonest[tuple(sorted(caption.split()))],
            prefix,
            name,
            "test" if prefix in HELD_OUT else "train",
            collections[prefix]["license"]["spdx"],
            FAMILIES.get(prefix, prefix),
        )
        for caption, prefix, name in found
    ]


def brands_of(names: dict[str, dict[str, bool]]) -> set[str]:
    """The captions that are the name of a brand or a currency."""
    return {caption_of(name) for prefix in BRAND_SETS for name in names.get(prefix, {})} - PLAIN_WORDS


def choose(collections: dict[str, dict], names: dict[str, dict[str, bool]], left_out: Counter[str]) -> list[Icon]:
    """The icons that are used, in the order of sets and names.

    Args:
        collections: what the package says about each set.
        names: the icons of each set, and whether it hides them.
        left_out: gets the number of icons that each rule leaves out.
    """
    brands = brands_of(names)
    icons = with_captions(collections, names, left_out)
    families: defaultdict[str, set[str]] = defaultdict(set)
    for icon in icons:
        if icon.split == "train":
            families[icon.caption].add(icon.family)
    chosen = []
    for icon in icons:
        if icon.caption in brands:
            left_out["named as a brand or a currency"] += 1
        elif len(families[icon.caption]) < LEAST_FAMILIES:
            left_out[f"of what fewer than {LEAST_FAMILIES} families drew"] += 1
        else:
            chosen.append(icon)
    return sorted(chosen, key=lambda icon: (icon.set, icon.name))


def choose_by_words(
    collections: dict[str, dict], names: dict[str, dict[str, bool]], left_out: Counter[str]
) -> list[Icon]:
    """The icons of which each word of the caption is known, which the captions of so many families have; those of
    `choose` are among them. The arguments are those of `choose`, and so is the order."""
    brands = brands_of(names)
    icons = with_captions(collections, names, left_out)
    families: defaultdict[str, set[str]] = defaultdict(set)
    for icon in icons:
        if icon.split == "train":
            for word in icon.caption.split():
                families[word].add(icon.family)
    chosen = []
    for icon in icons:
        words = icon.caption.split()
        if icon.caption in brands or BRAND_WORDS & set(words):
            left_out["named as or with a brand or a currency"] += 1
        elif any(len(families[word]) < LEAST_FAMILIES for word in words):
            left_out[f"with a word that fewer than {LEAST_FAMILIES} families have"] += 1
        elif len(words) > MOST_WORDS:
            left_out[f"with more than {MOST_WORDS} words"] += 1
        else:
            chosen.append(icon)
    return sorted(chosen, key=lambda icon: (icon.set, icon.name))
