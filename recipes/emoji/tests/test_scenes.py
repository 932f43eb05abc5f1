"""Pictures made from sprites show what their captions say, and nothing that the checks hold out."""

import numpy as np
import pytest
import torch

from arimage.eval.runs.prompts import read_prompts
from arimage.media.texts import as_words
from arimage_emoji import EMOJI_CHECKS
from arimage_emoji.data.scenes import HeldOut, SceneSettings, arrange, make_scenes
from arimage_emoji.data.wording import captions_of, is_countable, noun_of, plural, rare_keywords
from arimage_emoji.metrics.colours import COLOURS, colour_shares
from arimage_emoji.metrics.composition import connected_parts, foreground
from arimage_emoji.metrics.reference import read_gallery
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.sentences import NUMBERS, with_article


SIDE = 64
RGB = {"tomato": (215, 30, 30), "lime": (60, 170, 50), "bell": (250, 205, 40), "owl": (120, 120, 120)}
SETTINGS = SceneSettings(grounds=2, pairs=40, seed=3)
HELD_OUT = HeldOut(
    prompts=frozenset({("drawing", "of", "lime")}),
    colours=frozenset({("blue", "tomato"), ("pink", "bell")}),
    counts=frozenset({(2, "tomato"), (4, "owl")}),
    pairs=frozenset({frozenset({"lime", "bell"})}),
)


def sprite(rgb, radius=26):
    y, x = np.mgrid[:SIDE, :SIDE] - SIDE / 2 + 0.5
    inside = (x / radius) ** 2 + (y / (radius * 0.8)) ** 2 <= 1
    image = np.full((SIDE, SIDE, 3), 255, np.uint8)
    image[inside] = rgb
    return torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(inside.astype(np.uint8) * 255)[None]


@pytest.fixture(scope="module")
def data():
    pictures = [sprite(rgb) for rgb in RGB.values()]
    return ImageCaptions(
        images=torch.stack([image for image, _ in pictures]),
        alpha=torch.stack([alpha for _, alpha in pictures]),
        captions=[[name] for name in RGB],
        names=list(RGB),
        bases=list(RGB),
        weights=torch.tensor([1.0, 1.0, 1.0, 2.0]),
        groups=["food-drink", "food-drink", "objects", "animals-nature"],
        keywords=[["vegetable"], ["fruit", "citrus"], ["church"], ["bird", "wise"]],
    )


@pytest.fixture(scope="module")
def scenes(data):
    return make_scenes(data, SETTINGS, HELD_OUT)


def first_words(scenes):
    return [captions[0] for captions in scenes.captions]


def parts_of(image):
    return connected_parts(foreground(image[None])[0])


def main_colour(image, mask):
    shares = colour_shares(image[None], mask[None])[0]
    return list(COLOURS)[shares.argmax()] if shares.max() > 0.5 else None


def test_the_same_seed_gives_the_same_pictures_and_samples(data, scenes):
    again = make_scenes(data, SETTINGS, HELD_OUT)
    assert torch.equal(again.images, scenes.images) and torch.equal(again.alpha, scenes.alpha)
    assert again.captions == scenes.captions and torch.equal(again.weights, scenes.weights)
    sampled = [one.sample(20, torch.Generator().manual_seed(1)) for one in (scenes, again)]
    assert torch.equal(*sampled)
    other = make_scenes(data, SceneSettings(grounds=2, pairs=40, seed=4), HELD_OUT)
    assert other.captions != scenes.captions


def test_what_is_held_out_never_occurs(data, scenes):
    said = {caption.lower() for captions in scenes.captions for caption in captions}
    everything = {
        caption.lower()
        for captions in make_scenes(data, SETTINGS, HeldOut(*[frozenset()] * 4)).captions
        for caption in captions
    }
    gone = [
        "a drawing of a lime",
        "a blue tomato",
        "tomato, blue",
        "pink bell",
        "two tomatoes",
        "2 tomatoes",
        "four owls",
    ]
    assert set(gone) <= everything and not set(gone) & said
    assert {"a blue lime", "a pink tomato", "three tomatoes", "two owls", "a drawing of a bell"} <= said
    both = [caption for caption in said if "lime" in caption and "bell" in caption]
    assert not both and any("lime" in caption and "owl" in caption for caption in said)


def test_counts_are_right_in_connected_parts(scenes):
    numbers = {word: number for number, word in NUMBERS.items()}
    counted = [
        (image, text)
        for image, text in zip(scenes.images, first_words(scenes), strict=True)
        if text.split()[0] in numbers
    ]
    assert len(counted) == 4 * 3 - 2
    for image, text in counted:
        assert len(parts_of(image)) == numbers[text.split()[0]], text


def test_pairs_show_both_from_left_to_right(scenes):
    colours = {"tomato": "red", "lime": "green", "bell": "yellow", "owl": None}
    pairs = [(image, text) for image, text in zip(scenes.images, first_words(scenes), strict=True) if " and " in text]
    assert len(pairs) > 20
    for image, text in pairs:
        nouns = [words.split()[-1] for words in text.split(" and ")]
        assert [main_colour(image, part) for part in parts_of(image)] == [colours[noun] for noun in nouns], text


def test_recoloured_pictures_have_the_colour_of_their_caption(scenes):
    found = set()
    for image, text in zip(scenes.images[4:], first_words(scenes)[4:], strict=True):
        article, *words = text.split()
        if len(words) == 2 and words[0] in COLOURS:
            assert main_colour(image, foreground(image[None])[0]) == words[0]
            found.add(tuple(words))
    nouns = ("tomato", "lime", "bell")
    own = {("red", "tomato"), ("green", "lime"), ("yellow", "bell")}
    assert found == {(colour, noun) for colour in COLOURS for noun in nouns} - own - HELD_OUT.colours


def test_the_shares_of_the_samples_are_those_of_the_settings(data, scenes):
    first = first_words(scenes)
    numbers = tuple(NUMBERS.values())
    kinds = {
        "ground": ["background" in text for text in first],
        "counted": [text.startswith(numbers) for text in first],
        "pair": [" and " in text for text in first],
    }
    total = float(scenes.weights.sum())
    assert total == pytest.approx(1)
    for kind, chosen in kinds.items():
        assert float(scenes.weights[torch.tensor(chosen)].sum()) == pytest.approx(getattr(SETTINGS, f"{kind}_share"))
    plain = scenes.weights[:4]
    assert float(plain.sum()) == pytest.approx(1 - 0.08 - 0.16 - 0.12 - 0.16)
    assert plain[3] == pytest.approx(2 * float(plain[0]))


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("side", [32, 64])
def test_arranged_pictures_never_touch(count, side):
    image = torch.zeros(3, side, side, dtype=torch.uint8)
    alpha = torch.full((1, side, side), 255, dtype=torch.uint8)
    found, cover = arrange([image] * count, [alpha] * count)
    assert len(parts_of(found)) == len(connected_parts(cover[0] > 127)) == count


def test_the_packaged_checks_are_held_out():
    held_out, rows = HeldOut.of_checks(), read_prompts(EMOJI_CHECKS.path)
    for row in rows:
        assert (as_words(row["prompt"]) in held_out.prompts) == (row["check"] != "known")
    assert {("green", "heart"), ("blue", "book"), ("yellow", "circle")} <= held_out.colours
    counted = {(number, noun) for number, noun in held_out.counts}
    assert {as_words(f"{NUMBERS[number]} {plural(noun)}") for number, noun in counted} <= held_out.prompts
    assert all(len(pair) == 2 for pair in held_out.pairs) and len(held_out.pairs) >= 50
    # Every held-out object is a word for a picture that exists.
    nouns = {noun_of(name) for name in read_gallery()[1]}
    assert {noun for _, noun in held_out.colours | held_out.counts} <= nouns


def test_words_are_those_that_people_say():
    for name, noun in {"automobile": "car", "red heart": "heart", "light blue heart": "heart", "owl": "owl"}.items():
        assert noun_of(name) == noun
    many = {"cat": "cats", "bus": "buses", "cherry": "cherries", "key": "keys", "computer mouse": "computer mice"}
    for noun, plurals in (many | {"fish": "fish", "torch": "torches"}).items():
        assert is_countable(noun) and plural(noun) == plurals
    for noun in ("fire", "bread", "cherries", "glasses", "1st place medal", "mount Fuji"):
        assert not is_countable(noun)
    for text in ("a cat", "an owl", "a unicorn", "a ewe", "an umbrella", "a bus"):
        assert with_article(text.split()[1]) == text
    for text in ("bread", "red cherries", "the moon", "100"):
        assert with_article(text) == text
    assert rare_keywords([["animal", "pet"], ["animal", "wise"], ["animal"]], most=2) == [["pet"], ["wise"], []]
    captions = captions_of("automobile", ["driving"])
    assert captions[0] == "automobile" and {"car", "a car", "an automobile", "driving"} <= set(captions)
