"""The list of what a model has learned covers its captions."""

import numpy as np
import pytest
import torch

from arimage_emoji.data.scenes import NOTHING, SceneSettings, make_scenes
from arimage_emoji.data.wording import written_captions
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.collect import known_scenes


RGB = {"tomato": (215, 30, 30), "lime": (60, 170, 50), "bell": (250, 205, 40), "mouse": (120, 120, 120)}


@pytest.fixture(scope="module")
def data():
    """Four discs."""
    y, x = np.mgrid[:64, :64] - 31.5
    inside = x**2 + y**2 < 700
    images = np.full((4, 64, 64, 3), 255, np.uint8)
    for image, rgb in zip(images, RGB.values(), strict=True):
        image[inside] = rgb
    return ImageCaptions(
        images=torch.from_numpy(images).permute(0, 3, 1, 2),
        alpha=torch.from_numpy(np.tile(inside.astype(np.uint8) * 255, (4, 1, 1, 1))),
        captions=[
            [
                f"{name}, noto style",
                name,
                f"a {name}",
                f"noto emoji: {name}",
                "round, disc",
                f"{name} (round), glossy style",
            ]
            for name in RGB
        ],
        names=list(RGB),
        bases=list(RGB),
        weights=torch.ones(4),
        groups=["food-drink", "food-drink", "objects", "animals-nature"],
        keywords=[["vegetable"], ["fruit", "citrus"], ["church"], ["animal"]],
    )


def test_without_scenes_it_lists_the_captions_of_the_data_set(data):
    known = known_scenes(data, data)
    assert known.pictures == {name: ["round, disc"] for name in RGB}
    assert set(known.patterns) == {"{picture}, noto style", "noto emoji: {picture}"} and known.words == {}
    assert known.knows("Noto emoji: a lime") and not known.knows("two limes") and not known.knows("a blue lime")


def test_with_scenes_it_covers_every_caption_and_what_is_made_of_the_same_words(data):
    trained = make_scenes(data, SceneSettings(grounds=2, pairs=30), NOTHING)
    known = known_scenes(data, trained)
    captions = {text for texts in trained.captions for text in texts}
    lists = {text for text in captions if text.startswith(tuple(f"{name}, " for name in RGB))}
    assert {text for text in captions - lists if not known.knows(text)} == set()
    others = {
        name: [text for text in texts if text not in written_captions().get(name, ())]
        for name, texts in known.pictures.items()
    }
    assert others["lime"] == ["fruit", "citrus"] and others["mouse"] == ["animal", "little mouse"]
    for prompt in ("three mice", "a purple tomato", "a bell and a lime", "a lime on a light blue background"):
        assert known.knows(prompt), prompt
    for prompt in ("five mice", "a purple mouse", "a bell and a cat", "a lime on a table", "two purple tomatoes"):
        assert not known.knows(prompt), prompt


def test_sentences_around_a_caption_are_known_if_the_model_was_trained_on_them(data):
    for framed in (False, True):
        known = known_scenes(data, data, framed=framed)
        for prompt in ("can you draw a lime", "I want a cute bell", "a lovely tomato please"):
            assert known.knows(prompt) == framed, prompt
        assert not known.knows("can you draw a hat") and not known.knows("I want a furious bell")
        assert known.check("a hat", "m").message.startswith('"a hat" is not among the 4 pictures that m knows; ')
