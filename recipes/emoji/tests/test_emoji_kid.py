"""The packaged reference tells good images of emoji from bad ones, and an image of the prompt from another."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from arimage.eval.job import Job
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.runs.prompts import read_prompts
from arimage.eval.score import METRICS_FILE, score
from arimage_emoji import REFERENCE
from arimage_emoji.metrics.emoji_kid import EmojiExtractor, emoji_kernel_distance
from arimage_emoji.metrics.reference import read_gallery, reference_features
from arimage_emoji.metrics.retrieval import emoji_retrieval


@pytest.fixture(scope="module")
def extractor():
    return EmojiExtractor()


@pytest.fixture(scope="module")
def prompts():
    return read_prompts(REFERENCE / "prompts.jsonl")


@pytest.fixture(scope="module")
def pictures(prompts):
    """What the reference is of, from the gallery: 32 pixels made 64."""
    gallery, names = read_gallery()
    chosen = gallery[[names.index(row["name"]) for row in prompts]]
    images = (chosen * 255).round().byte().permute(0, 2, 3, 1).numpy()
    return [Image.fromarray(image).resize((64, 64), Image.Resampling.BICUBIC) for image in images]


def distance(extractor, images):
    prompts = [str(i) for i in range(len(images))]
    return emoji_kernel_distance(extractor(images).numpy(), reference_features(), prompts).value


def test_the_reference_is_small_and_whole(extractor, prompts):
    assert sum(path.stat().st_size for path in REFERENCE.rglob("*") if path.is_file()) <= 2.6e6
    assert sum(value.numel() for value in extractor.classifier.parameters()) <= 500_000
    gallery, names = read_gallery()
    assert len(gallery) == len(names) == len(set(names)) == 3294
    assert gallery.min() == 0 and gallery.max() == 1
    assert len({row["name"] for row in prompts}) == 447 and {row["name"] for row in prompts} <= set(names)
    assert reference_features().shape == (447, extractor.classifier.config.channels[-1])


def test_features_are_those_of_the_packaged_classifier(extractor, pictures):
    """The reference pictures are not in the package, their small copies must be nearest to them nonetheless."""
    nearest = torch.cdist(extractor(pictures), torch.from_numpy(reference_features())).argmin(1)
    assert (nearest == torch.arange(447)).float().mean() > 0.9


def test_the_distance_is_that_of_the_definition():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 3)), rng.normal(size=(5, 3)) + 1

    def mean(a, b):
        return np.mean([(np.dot(one, other) / 3 + 1) ** 3 for one in a for other in b])

    found = emoji_kernel_distance(x, y, ["same"] * 7)
    assert found.value == pytest.approx(mean(x, x) + mean(y, y) - 2 * mean(x, y))


@pytest.mark.parametrize("per_prompt", [1, 3])
def test_the_error_is_over_other_prompts_with_their_pictures(per_prompt):
    rng = np.random.default_rng(0)
    prompts = [str(i) for i in range(200) for _ in range(per_prompt)]

    def estimate():
        pictures = rng.normal(size=(200, 3))
        # What a model gets wrong about a prompt, it gets wrong in all of its images.
        images = (pictures + 0.5 + 0.3 * rng.normal(size=(200, 3))).repeat(per_prompt, axis=0)
        return emoji_kernel_distance(images, pictures.repeat(per_prompt, axis=0), prompts)

    repeats = [estimate() for _ in range(80)]
    spread, reported = np.std([each.value for each in repeats]), np.mean([each.standard_error for each in repeats])
    assert reported == pytest.approx(spread, rel=0.3)


def test_a_run_is_scored(pictures, prompts, tmp_path, write_run):
    asked = prompts[:40]
    run = tmp_path / "run"
    write_run(run, prompt_rows(asked, 0), pictures[:30] + pictures[:10])
    hits = emoji_retrieval(run, *read_gallery())
    assert hits.shape == (40, 5) and hits[:30, 0].all() and not hits[30:, 0].any()
    found = score(Job(run), ["retrieval", "emoji-kid"])
    assert found["retrieval"]["value"] == 0.75 and found["retrieval-top-5"]["value"] >= 0.75
    assert found["emoji-kid"]["count"] == 40 and found["emoji-kid"]["space"]["name"] == "emoji-classifier"
    # It is that of the prompts that were asked for, not of all.
    right = tmp_path / "right"
    write_run(right, prompt_rows(asked, 0, 2), [each for each in pictures[:40] for _ in range(2)])
    assert 10 * score(Job(right), ["emoji-kid"])["emoji-kid"]["value"] < found["emoji-kid"]["value"]
    assert json.loads((run / METRICS_FILE).read_text()).keys() == found.keys()
    scores = json.loads((run / "scores" / "retrieval.json").read_text())
    assert scores == {"ids": list(range(40)), "values": [1.0] * 30 + [0.0] * 10}
