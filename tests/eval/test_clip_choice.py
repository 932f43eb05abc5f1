"""CLIP chooses among the alternatives of prompts: the command, against the model itself."""

import json

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPModel

from arimage.eval.job import Job
from arimage.eval.metrics.standard_errors import mean_estimate
from arimage.eval.runs.manifest import prompt_rows
from arimage.eval.score import score


COLOURS = ["a red heart", "a blue heart", "a green heart"]
PROMPTS = [
    {"prompt": "a red heart", "alternatives": {"colour": COLOURS, "object": ["a red heart", "a red book"]}},
    {"prompt": "a green tree", "alternatives": {"object": ["a green tree", "a cat", "a book", "a grinning face"]}},
    {"prompt": "a blue book", "alternatives": {"colour": ["a blue book", "a red book", "a green book"]}},
]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return tiny.save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture
def run(tmp_path, write_run):
    noise = np.random.default_rng(0).integers(0, 256, (24, 4, 4, 3), dtype=np.uint8)
    write_run(tmp_path / "run", prompt_rows(PROMPTS, 0, per_prompt=8), noise.repeat(8, 1).repeat(8, 2))
    return tmp_path / "run"


def choices(clip, run):
    """By transformers alone: for each image, whether the first text of each question has the highest logit."""
    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPImageProcessor.from_pretrained(clip)
    found = []
    for i in range(24):
        image = Image.open(run / "images" / f"{i:06d}.png")
        outcome = {}
        for name, texts in PROMPTS[i // 8]["alternatives"].items():
            ids = tiny.text_tokenizer(12)(texts, padding=True, return_tensors="pt")
            with torch.no_grad():
                logits = model(
                    input_ids=ids.input_ids,
                    attention_mask=ids.attention_mask,
                    pixel_values=processor(image, return_tensors="pt").pixel_values,
                ).logits_per_image[0]
            # Farther apart than rounding.
            assert logits.topk(2).values.diff().abs() > 1e-3
            outcome[name] = int(logits.argmax()) == 0
        found.append(outcome)
    return found


def test_the_command_prints_the_shares_of_the_model_next_to_chance(clip, run, command):
    options = ["--metrics", "clip-choice", "--clip", clip, "--batch-size", 3, "--device", "cpu"]
    code, out, _ = command("eval", "score", run, *options)
    printed, entries = out.splitlines(), json.loads((run / "metrics.json").read_text())
    assert code == 0
    theirs = choices(clip, run)
    expected = {
        "clip-choice": ([all(one.values()) for one in theirs], np.repeat([0, 1, 2], 8), "chance 0.250,"),
        "clip-choice-colour": (
            [one["colour"] for one in theirs[:8] + theirs[16:]],
            np.repeat([0, 2], 8),
            "chance 0.333,",
        ),
        "clip-choice-object": ([one["object"] for one in theirs[:16]], np.repeat([0, 1], 8), "chance 0.375,"),
    }
    assert list(entries) == list(expected)
    for line, (name, (hits, prompts, chance)) in zip(printed, expected.items(), strict=True):
        assert 0 < np.mean(hits) < 1
        entry, estimate = entries[name], mean_estimate(np.array(hits), prompts)
        assert (entry["value"], entry["count"], entry["prompts"]) == (np.mean(hits), len(hits), len(set(prompts)))
        assert entry["standard_error"] == estimate.standard_error
        assert line.startswith(f"{name}: ") and chance in line
    assert json.loads((run / "scores" / "clip-choice.json").read_text())["values"] == expected["clip-choice"][0]


def test_prompts_without_alternatives_are_refused(clip, run, write_run):
    write_run(run, prompt_rows([{"prompt": "a red heart"}], 0), np.zeros((1, 8, 8, 3), np.uint8))
    with pytest.raises(ValueError, match="image 0 .* has no alternatives"):
        score(Job(run, clip=clip), ["clip-choice"])
