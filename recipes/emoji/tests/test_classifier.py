"""The classifier learns, goes on after an interruption, and leaves a reference that the scores read."""

import itertools
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from arimage.training import loop
from arimage.training.loop import OptimizerSettings
from arimage_emoji.data.classifier import ClassifierSettings, ClassifierTask, run_classifier
from arimage_emoji.metrics.classifier_emoji import EmojiClassifier
from arimage_emoji.metrics.emoji_kid import EmojiExtractor
from arimage_emoji.metrics.reference import reference_features
from arimage_emoji.training.captioned import load_captioned_images


SIZE = 32
COLOURS = {"red": (220, 30, 30), "green": (20, 180, 60), "blue": (30, 60, 230)}
RECIPE = {
    "image_size": SIZE,
    "tokenizer": {"data": {"styles": ["flat"]}},
    "transformer": {"data": {"styles": ["flat"], "groups": ["discs"]}},
}
SETTINGS = ClassifierSettings(
    OptimizerSettings(steps=40, learning_rate=1e-2, warmup_steps=4, ema_decay=0.9), batch_size=16
)


def rows():
    """Squares and discs of three colours in two styles."""
    y, x = np.mgrid[:SIZE, :SIZE] - SIZE / 2 + 0.5
    shapes = {"square": (abs(x) < 9) & (abs(y) < 9), "disc": x**2 + y**2 < 40}
    for style, (shape, inside), (colour, rgb) in itertools.product(("flat", "line"), shapes.items(), COLOURS.items()):
        picture = np.full((SIZE, SIZE, 3), 255, np.uint8)
        picture[inside] = rgb if style == "flat" else np.array(rgb) * 4 // 5
        names = {"name": f"{colour} {shape}", "base": f"{shape}-{colour}", "style": style, "group": f"{shape}s"}
        yield {"image": picture, "alpha": inside, "caption": f"a {colour} {shape}, {style} style", **names}


@pytest.fixture(scope="module")
def data(tmp_path_factory, write_pictures):
    """A training set, and a held-out set with a concept that the training set has not."""
    folder = tmp_path_factory.mktemp("data")
    kept = [row for row in rows() if row["base"] != "square-blue"]
    return write_pictures(folder / "train.parquet", kept), write_pictures(folder / "heldout.parquet", rows())


@pytest.fixture(scope="module", autouse=True)
def no_plots():
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(loop, "plot_log", lambda log, path: None)
        yield


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run_classifier(RECIPE, *data, out, "cpu", SETTINGS)
    return out


def test_it_learns_and_judges_known_concepts_only(trained, data):
    log = [json.loads(line) for line in (trained / "classifier" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["held-out top-1"] > 0.7 and log[-1]["held-out top-5"] == 1
    images = [load_captioned_images(path, SIZE) for path in data]
    task = ClassifierTask(EmojiClassifier(num_classes=5), *images, SETTINGS)
    assert len(task.heldout) == 10 and len(task.labels) == 10


def test_the_reference_is_of_the_pictures_that_the_model_of_the_recipe_learned(trained, data):
    folder = trained / "reference"
    learned = load_captioned_images(data[0], SIZE, **RECIPE["transformer"]["data"])
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert prompts[0] == {"prompt": "a red disc, flat style", "name": "red disc"} and len(prompts) == len(learned) == 3
    extractor = EmojiExtractor(folder)
    features = extractor([Image.fromarray(image.permute(1, 2, 0).numpy()) for image in learned.images])
    assert features.dtype == torch.float32 and features.shape == (3, 96)
    np.testing.assert_allclose(reference_features(folder), features, atol=2e-3)
    assert {value.dtype for value in load_file(next((folder / "classifier").glob("*.safetensors"))).values()} == {
        torch.float16
    }
