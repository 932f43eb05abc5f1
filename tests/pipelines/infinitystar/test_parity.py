"""Whole calls next to the authors' (tiny random weights in the published formats), and the schedules of all sizes."""

import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from pipelines.infinitystar import tiny
from safetensors.torch import load_file

from arimage.pipelines.infinitystar.scale_model import InfinityStarScaleModel
from arimage.pipelines.infinitystar.schedules import COUNTS, SCHEDULES, clip_lengths, passes, repetitions_of


GRIDS = json.loads((tiny.FIXTURES / "schedules.json").read_text())
RUNS = tiny.CONFIG["runs"]
# Films of 5 and 10 seconds, and what another run has too.
SLOW = ("t2v5", "v2v", "t2i", "t2i_unguided", "i2v")


@pytest.fixture(scope="module")
def expected():
    return load_file(tiny.FIXTURES / "expected.safetensors")


@pytest.fixture(scope="module")
def pipe():
    return tiny.golden_pipeline()


def arguments_of(name, expected):
    """The arguments of the call that makes a run of the authors' again."""
    run = RUNS[name]
    given = {name: run[name] for name in ("height", "width", "num_frames")}
    given |= {"temperature": [run.get("tau_image", 1.0), run.get("tau_video", 0.4)], "top_k": 1}
    given["guidance_scale"] = float(run.get("cfg", 34))
    if not run.get("apg", True):
        given["apg_norm_threshold"] = None
    if "negative" in run:
        given["negative_prompt"] = run["negative"]
    if "given" in run:
        frames = expected[f"{name}.given"]
        for dim, count in enumerate(run["blocks"]):
            frames = frames.repeat_interleave(count, dim)
        height, width = run.get("size", (run["height"], run["width"]))
        frames = [Image.fromarray(frame[:height, :width].numpy()) for frame in frames]
        given |= {"image": frames[0]} if run["given"] == "image" else {"video": frames[:81]}
    return given


def packed(tokens):
    return np.packbits(torch.cat([part.flatten() for part in tokens]).numpy().astype(np.uint8))


@pytest.mark.parametrize("ratio", GRIDS)
def test_grids_are_those_of_the_original(ratio):
    grids = tuple(map(tuple, GRIDS[ratio]["grids"]))
    for pixels, (height, width) in GRIDS[ratio]["pixels"].items():
        assert SCHEDULES[pixels, (height // 16, width // 16)] == grids[: COUNTS[pixels]]


@pytest.mark.parametrize("name", RUNS)
def test_passes_are_those_of_the_original(pipe, name):
    run = RUNS[name]
    film = pipe.film((run["height"], run["width"]), run["num_frames"])
    found = [[one.clip * COUNTS["0.06M"] + one.grid, *one.shape, one.bits] for one in film]
    assert found == run["passes"]


def test_the_published_films_have_the_published_passes():
    grids, repetitions = SCHEDULES["0.40M", (30, 53)], repetitions_of("0.40M")
    film = passes(grids, 21, (16, 64), repetitions)
    assert len(film) == 81 and sum(one.last for one in film) == 2
    assert sum(math.prod(one.shape) for one in film) == 161_397
    assert len(passes(grids, 41, (16, 64), repetitions)) == 120
    assert len(passes(SCHEDULES["0.90M", (45, 80)], 21, (16, 64), repetitions_of("0.90M"))) == 85
    assert clip_lengths(1) == [1] and clip_lengths(13) == [1, 12] and clip_lengths(41) == [1, 20, 20]
    for frames in (0, 3, 29):
        with pytest.raises(ValueError, match=f"a film has {frames} latent frames"):
            clip_lengths(frames)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in RUNS]
)
def test_a_call_makes_the_bits_and_frames_of_the_original(pipe, expected, name, monkeypatch):
    run, seen = RUNS[name], {}
    guide = InfinityStarScaleModel.guide

    def recorded(model, logits, *settings):
        guided = guide(model, logits, *settings)
        seen[model.fed[len(seen)]] = logits[:, 0], guided
        return guided

    monkeypatch.setattr(InfinityStarScaleModel, "guide", recorded)
    out = pipe(run["prompt"], **arguments_of(name, expected), output_type="np")
    assert (packed(out.tokens) == expected[f"{name}.bits"].numpy()).all()
    # Of given passes, those over each clip that the next one reads are fed.
    kept = {"image": 1, "video": 2}.get(run.get("given"), 0)
    assert out.stats.forward_passes == len(run["passes"]) - run["forced_passes"] + kept
    for number, (logits, guided) in seen.items():
        for kind, ours in (("cond", logits[0]), ("uncond", logits[-1]), ("guided", guided)):
            theirs = expected.get(f"{name}.logits_{kind}_{number}")
            if theirs is not None:
                torch.testing.assert_close(ours.reshape(theirs.shape), theirs, atol=1e-4, rtol=0)
    pixels = torch.from_numpy(out.frames[0]).movedim(-1, 1)[run.get("shown", slice(None))][..., ::8, ::8]
    theirs = (expected[f"{name}.pixels"].float() / 2 + 0.5).clamp(0, 1)
    if len(theirs) > 1:
        theirs[0] = theirs[1]
    torch.testing.assert_close(pixels, theirs, atol=1e-3, rtol=0)
