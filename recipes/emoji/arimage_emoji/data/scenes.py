"""More pictures from the sprites of a data set, with captions that say what was done: recoloured, on coloured grounds,
several of one kind, and two of different kinds. What `emoji-checks` asks for is never made."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field

from arimage.eval.runs.prompts import read_prompts
from arimage.media.texts import Words, as_words
from arimage.settings.schema import COMPLETE, Flag, Seed, Share

from .. import EMOJI_CHECKS
from ..metrics.colours import COLOURS, colour_shares, main_hues, recolour
from ..metrics.composition import ONE_COLOUR, connected_parts, foreground
from ..training.captioned import ImageCaptions
from ..training.sentences import NUMBERS, with_article
from .wording import captions_of, is_countable, noun_of, plural, rare_keywords


GROUNDS = {
    "red": (235, 64, 52),
    "orange": (250, 150, 40),
    "yellow": (255, 221, 70),
    "green": (75, 175, 90),
    "light green": (190, 232, 170),
    "blue": (60, 115, 220),
    "light blue": (170, 215, 250),
    "purple": (140, 80, 190),
    "pink": (250, 170, 200),
    "brown": (140, 95, 60),
    "grey": (160, 160, 160),
    "black": (25, 25, 25),
}
OBJECT_GROUPS = ("animals-nature", "food-drink", "travel-places", "objects", "activities")
# Objects that Unicode files elsewhere.
OBJECTS = ("red heart", "robot", "ghost", "alien", "skull", "red circle", "red square")
# Names there that say what happens rather than what is seen.
NOT_OBJECTS = (
    "unlocked", "pouring liquid", "building construction", "chart increasing", "chart decreasing", "party popper",
    "low battery", "level slider",
)  # fmt: skip
# Centres of the parts, in quarters of the side from the left and from the top.
PLACES = {2: ((1, 2), (3, 2)), 3: ((1, 1), (3, 1), (2, 3)), 4: ((1, 1), (3, 1), (1, 3), (3, 3))}


# The captions that `make_scenes` writes, for the list of what a model knows; `scene_words` has their words.
SCENE_PATTERNS = (
    "{picture} on a {ground} background",
    "{colour} {coloured}", "a picture of a {colour} {coloured}", "{coloured}, {colour}",
    "{number} {things}", "a picture of {number} {things}",
    "{thing} and {thing}", "{thing} next to {thing}", "{thing} to the left of {thing}",
)  # fmt: skip


@dataclass(frozen=True)
class SceneSettings:
    """How many pictures are made: `grounds` of each image on coloured backgrounds, if `counted` one of each noun and
    number, `pairs` in all, and one of each sprite of one colour in every other colour. The shares of the samples are
    those of each kind; images as they are get the rest."""

    grounds: Annotated[int, Field(strict=True, ge=0, le=100)] = 1
    counted: Flag = True
    pairs: Annotated[int, Field(strict=True, ge=0, le=100_000)] = 12_000
    ground_share: Share = 0.08
    recoloured_share: Share = 0.16
    counted_share: Share = 0.12
    pair_share: Share = 0.16
    seed: Seed = 0
    __pydantic_config__ = COMPLETE

    def __post_init__(self):
        made = self.ground_share + self.recoloured_share + self.counted_share + self.pair_share
        if made > 1:
            raise ValueError(f"the shares of the made pictures are {made:g} together: give at most 1")


@dataclass(frozen=True)
class HeldOut:
    """What no picture is made of and no caption says; `prompts` are words as `as_words` gives them."""

    prompts: frozenset[Words]
    colours: frozenset[tuple[str, str]]
    counts: frozenset[tuple[int, str]]
    pairs: frozenset[frozenset[str]]

    @classmethod
    def of_checks(cls, path: Path = EMOJI_CHECKS.path) -> "HeldOut":
        """What the prompts of `emoji-checks` ask for, other than known captions."""
        rows = [row for row in read_prompts(path) if row["check"] != "known"]
        return cls(
            prompts=frozenset(as_words(row["prompt"]) for row in rows),
            colours=frozenset((row["colour"], row["noun"]) for row in rows if row["check"] == "colours"),
            counts=frozenset((len(row["parts"]), row["noun"]) for row in rows if row["check"] == "counts"),
            pairs=frozenset(frozenset(row["nouns"]) for row in rows if row["check"] == "pairs"),
        )

    def has_colour(self, colour: str, noun: str) -> bool:
        """Whether the noun, or one that begins with it ("heart suit" with "heart"), is held out in this colour."""
        return any(colour == held and f"{noun} ".startswith(f"{other} ") for held, other in self.colours)


NOTHING = HeldOut(frozenset(), frozenset(), frozenset(), frozenset())


def one_coloured(data: ImageCaptions) -> dict[int, int]:
    """The hue in degrees of the objects of `data` that are mostly of one colour, by their index."""
    hues, shares = main_hues(data.images, data.alpha[:, 0] > 127)
    return {i: int(hues[i]) for i in _objects(data) if shares[i] >= ONE_COLOUR}


def countable(data: ImageCaptions) -> list[int]:
    """Indices of the objects that can be counted: their noun is countable, and their picture in one part."""
    return [
        i
        for i in _objects(data)
        if is_countable(noun_of(data.names[i])) and len(connected_parts(data.alpha[i, 0] > 127)) == 1
        and len(connected_parts(foreground(data.images[i : i + 1])[0])) == 1
    ]  # fmt: skip


def scene_words(data: ImageCaptions) -> dict[str, list[str]]:
    """The words that stand for each other in `SCENE_PATTERNS`."""
    objects = countable(data)
    things = [noun_of(data.names[i]) for i in objects]
    names = [data.names[i] for i in objects if is_countable(data.names[i])]
    words = {
        "ground": GROUNDS,
        "colour": COLOURS,
        "coloured": (noun_of(data.names[i]) for i in one_coloured(data)),
        "number": (*NUMBERS.values(), *map(str, NUMBERS)),
        "thing": things,
        "things": map(plural, (*things, *names)),
    }
    return {slot: list(dict.fromkeys(choices)) for slot, choices in words.items()}


def _objects(data: ImageCaptions) -> Iterable[int]:
    for i, (name, group) in enumerate(zip(data.names, data.groups, strict=True)):
        if (group in OBJECT_GROUPS or name in OBJECTS) and name not in NOT_OBJECTS and len(name.split()) <= 3:
            yield i


def on_ground(image: torch.Tensor, alpha: torch.Tensor, colour: str) -> torch.Tensor:
    """An image uint8 [3, S, S] that lies on white, on `colour` of `GROUNDS` instead."""
    ground = torch.tensor(GROUNDS[colour]).view(3, 1, 1) - 255
    return (image + (1 - alpha.float() / 255) * ground).round().clamp(0, 255).byte()


def arrange(images: list[torch.Tensor], alphas: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two to four images uint8 [3, S, S] and their alphas [1, S, S], small and apart on one of the same size.

    Of 64 pixels, each fits 24 and lies in a square of 32 whose corner is a multiple of 16. So an image has much the
    same tokens in all places, which a model must learn only once, and its edges are those of tokens.
    """
    side = images[0].shape[-1]
    canvas = torch.full((4, side, side), 255, dtype=torch.uint8)
    canvas[3] = 0
    for image, alpha, (across, down) in zip(images, alphas, PLACES[len(images)], strict=True):
        rows, columns = ((alpha[0] > 20).any(axis).nonzero() for axis in (1, 0))
        box = (slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
        layers = torch.cat([image, alpha])[:, *box].float()
        scale = side * 3 / 8 / max(layers.shape[1:])
        shape = [max(1, round(length * scale)) for length in layers.shape[1:]]
        layers = F.interpolate(layers[None], size=shape, mode="bilinear", antialias=True, align_corners=False)[0]
        top, left = (side * middle // 4 - length // 2 for middle, length in zip((down, across), shape, strict=True))
        canvas[:, top : top + shape[0], left : left + shape[1]] = layers.round().clamp(0, 255).byte()
    return canvas[:3], canvas[3:]


class _Pictures:
    """Pictures that are being collected, with their captions."""

    def __init__(self, prompts: frozenset[Words]):
        self.prompts = prompts
        self.images, self.alphas, self.captions, self.names, self.weights = [], [], [], [], []

    def add(self, image: torch.Tensor, alpha: torch.Tensor, captions: list[str], name: str, weight: float = 1) -> None:
        captions = [caption for caption in captions if as_words(caption) not in self.prompts]
        if captions:
            for kept, one in (
                (self.images, image), (self.alphas, alpha), (self.captions, captions), (self.names, name),
                (self.weights, weight),
            ):  # fmt: skip
                kept.append(one)


def make_scenes(data: ImageCaptions, settings: SceneSettings, held_out: HeldOut | None = None) -> ImageCaptions:
    """`data` with captions as people type them, and the pictures that `settings` asks for. The same for the same
    arguments.

    Args:
        data: sprites on white.
        held_out: what is left out; default: what `emoji-checks` asks for.
    """
    held_out = HeldOut.of_checks() if held_out is None else held_out
    generator = torch.Generator().manual_seed(settings.seed)
    kinds = {kind: _Pictures(held_out.prompts) for kind in ("plain", "ground", "recoloured", "counted", "pair")}
    keywords, every_name = rare_keywords(data.keywords), set(data.names)
    hues = one_coloured(data)
    own = _own_colours(data, hues)
    for i, name in enumerate(data.names):
        image, alpha, weight = data.images[i], data.alpha[i], float(data.weights[i])
        # "cat" alone asks for the picture of this name, not for "cat face", which "a cat" may ask for too.
        captions = [text for text in captions_of(name, keywords[i]) if text == name or text not in every_name]
        if i in own:
            captions += _coloured(own[i], noun_of(name))
        kinds["plain"].add(image, alpha, captions, name, weight)
        for _ in range(settings.grounds):
            colour = list(GROUNDS)[int(torch.randint(len(GROUNDS), (), generator=generator))]
            texts = [f"{with_article(noun)} on {with_article(colour)} background" for noun in (name, noun_of(name))]
            kinds["ground"].add(on_ground(image, alpha, colour), torch.full_like(alpha, 255), texts, name, weight)
    for i, hue in hues.items():
        noun = noun_of(data.names[i])
        for colour in COLOURS:
            if colour != own.get(i) and not held_out.has_colour(colour, noun):
                image = recolour(data.images[i : i + 1], [hue], colour)[0]
                kinds["recoloured"].add(image, data.alpha[i], _coloured(colour, noun), data.names[i])
    objects = countable(data)
    for i in objects if settings.counted else ():
        noun = noun_of(data.names[i])
        for number, word in NUMBERS.items():
            if (number, noun) in held_out.counts:
                continue
            texts = [f"{word} {plural(noun)}"] * 2 + [
                f"{number} {plural(noun)}",
                f"a picture of {word} {plural(noun)}",
            ]
            if is_countable(data.names[i]) and data.names[i] != noun:
                texts.append(f"{word} {plural(data.names[i])}")
            image, alpha = arrange([data.images[i]] * number, [data.alpha[i]] * number)
            kinds["counted"].add(image, alpha, texts, f"{word} {data.names[i]}")
    for _ in range(settings.pairs if len(objects) > 1 else 0):
        i, j = (objects[k] for k in torch.randperm(len(objects), generator=generator)[:2].tolist())
        first, second = noun_of(data.names[i]), noun_of(data.names[j])
        if first == second or frozenset((first, second)) in held_out.pairs:
            continue
        a, b = with_article(first), with_article(second)
        texts = [f"{a} and {b}", f"{first} and {second}", f"{a} next to {b}", f"{a} to the left of {b}"]
        image, alpha = arrange([data.images[i], data.images[j]], [data.alpha[i], data.alpha[j]])
        kinds["pair"].add(image, alpha, texts, f"{data.names[i]} and {data.names[j]}")
    shares = {
        "ground": settings.ground_share, "recoloured": settings.recoloured_share,
        "counted": settings.counted_share, "pair": settings.pair_share,
    }  # fmt: skip
    shares["plain"] = 1 - sum(shares.values())
    return _joined({kind: pictures for kind, pictures in kinds.items() if pictures.images}, shares)


def _own_colours(data: ImageCaptions, hues: dict[int, int]) -> dict[int, str]:
    """The colour of each sprite of one colour that has one of `COLOURS`, by its index."""
    if not hues:
        return {}
    index = list(hues)
    shares = colour_shares(data.images[index], data.alpha[index, 0] > 127)
    names = list(COLOURS)
    return {i: names[row.argmax()] for i, row in zip(index, shares, strict=True) if row.max() > ONE_COLOUR / 2}


def _coloured(colour: str, noun: str) -> list[str]:
    text = with_article(f"{colour} {noun}")
    return [text, text, f"{colour} {noun}", f"a picture of {text}", f"{noun}, {colour}"]


def _joined(kinds: dict[str, _Pictures], shares: dict[str, float]) -> ImageCaptions:
    weights = []
    for kind, pictures in kinds.items():
        own = torch.tensor(pictures.weights)
        weights.append(own / own.sum() * shares[kind])
    every = list(kinds.values())
    names = [name for pictures in every for name in pictures.names]
    return ImageCaptions(
        images=torch.stack([image for pictures in every for image in pictures.images]),
        alpha=torch.stack([alpha for pictures in every for alpha in pictures.alphas]),
        captions=[captions for pictures in every for captions in pictures.captions],
        names=names,
        bases=names,
        weights=torch.cat(weights),
    )
