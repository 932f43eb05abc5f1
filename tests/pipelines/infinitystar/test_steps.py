"""Passes of InfinityStar by the kernels of a step are those of its layers in torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import card
import pytest
import torch
from accelerator.runs import fresh
from families import seeded
from interpreted_films import ROWS, film, passes
from steps import allow_steps, count_layers

import arimage.kernels.step
from arimage.kernels.step import MOST_ROWS


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize(
    ("most", "options", "settings"),
    [
        (MOST_ROWS, {}, {}),
        (MOST_ROWS, {"padded": False}, {}),
        (MOST_ROWS, {"quantized": True}, {}),
        (MOST_ROWS, {}, {"pruned": {3: 0.5}}),
        (1, {}, {}),
        (1, {}, {"pruned": {3: 0.5}}),
    ],
    ids=["few", "few without padding", "few of 8 bits", "few without some cells", "many", "many without some cells"],
)
def test_passes_by_the_kernels(monkeypatch, most, options, settings):
    model = film(**options)
    expected = passes(model, **settings)
    allow_steps(monkeypatch)
    rows = count_layers(monkeypatch)
    monkeypatch.setattr(arimage.kernels.step, "MOST_ROWS", most)
    found = passes(model, **settings)
    torch.testing.assert_close(found, expected, **CLOSE)
    # The second pass is kept for the next clip.
    few = [ROWS[0], ROWS[2], *([ROWS[3] // 2] if settings else []), ROWS[2] // 2]
    assert rows == ([] if most == 1 else [count for count in few for _ in model.transformer.blocks])


@pytest.mark.slow
def test_the_interpreter_gives_the_logits_of_the_layers():
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).parents[2] / "interpreted_films.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    told = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)
    assert found["rows"] and max(found["distances"]) < 5e-4


@pytest.mark.slow
def test_films_on_the_card_by_the_kernels(monkeypatch):
    def films(pipe):
        return [
            pipe(
                ["a red heart", "cat"],
                num_frames=17,
                generator=[seeded(10 * number), seeded(10 * number + 1)],
                guidance_scale=3.0,
                output_type="latent",
            ).tokens
            for number in range(2)
        ]

    expected = films(fresh("infinitystar", "cpu"))
    allow_steps(monkeypatch)
    rows = count_layers(monkeypatch)
    with card.card() as device:
        found = films(fresh("infinitystar"))
        replays = device.replays
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(one.cpu(), other) for one, other in zip(ours, theirs, strict=True))
    assert rows and replays
