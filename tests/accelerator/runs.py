"""Tiny pipelines of every family on the CPU and on the card, and what their calls give."""

import contextlib
import traceback
from collections.abc import Callable, Iterable
from functools import cache

import card
import pytest
import tiny
import torch
from families import EVERY, flat, having, seeded
from pipelines.arpg import tiny as tiny_arpg
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.mar import tiny as tiny_mar

from arimage.decoding import PRESETS, Decoding
from arimage.decoding.jacobi import speculative_jacobi


pytest.importorskip("triton", reason="triton is not installed, and its kernels are what runs on a card")

PROMPTS = ["a red heart", "a blue book, flat style", "tree", "cat", "a grinning cat face", "book", "green tree"]


FAMILIES = {**EVERY, "mar": tiny_mar.pipeline_with_drafter}
# Images of 256 and of 64 tokens.
LARGE = {
    "arpg-large": lambda: tiny_arpg.pipeline(grid=16),
    "llamagen-large": lambda: tiny_llamagen.text_pipeline(grid=8),
}
# The others share their model or its steps with another family.
QUICK = [family for family in FAMILIES if family not in having("shared steps")]


def families(quick: list[str]):
    """Parametrizes a test by family, those that are not `quick` being slow."""
    slow = [pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES if family not in quick]
    return pytest.mark.parametrize("family", quick + slow)


# Windows so small that a tiny image takes more steps than there are before a capture.
SMALL = {
    "SpeculativeJacobiDecoding": "window=4",
    "TreeJacobiDecoding": "window=6,depth=3",
    "LazyJacobiDecoding": "window=8,chain=4,tokens=4",
    "ZipARDecoding": "window=2",
    "ParallelJacobiDecoding": "window=4",
    "LineCacheDecoding": "lines=2",
    "GroupDecoding": "groups=4",
    "FewStepDecoding": "starts=0+3",
    "FlowDecoding": "window=4",
    "PathJacobiDecoding": "window=4",
    "PathSpeculativeDecoding": "window=3",
    "LazyMAR": "first=1",
    "HaltonDecoding": "steps=5",
    "ConfidenceDecoding": "steps=5",
}


def small(name: str) -> str:
    """A preset as text, with a window for tiny images."""
    settings = SMALL.get(PRESETS[name].method)
    return name if settings is None else f"{name}:{settings}"


def methods(names: Iterable[str]) -> list[str]:
    """The first preset of each method."""
    return list({PRESETS[name].method: name for name in reversed(list(names))}.values())


@cache
def pipeline(family: str, kind: str):
    """The pipeline of a family on the "cpu", on a CUDA device "eager" or, as by default, "replayed", or on another
    accelerator, "xpu"."""
    with torch.no_grad():
        pipe = (FAMILIES | LARGE)[family]()
    if kind != "cpu":
        card.move(pipe, "xpu" if kind == "xpu" else "cuda")
    if kind == "eager":
        pipe.run_eagerly()
    return pipe


def fresh(family: str = "llamagen-text", place: str = "cuda"):
    """A pipeline of its own, whose weights and graphs a test may change."""
    with torch.no_grad():
        pipe = FAMILIES[family]()
    pipe.set_progress_bar_config(disable=True)
    return card.move(pipe) if place == "cuda" else pipe


def conditions(pipe, count: int, first: int = 0) -> dict:
    """The prompts, classes or token maps of `count` images, from the `first` one on."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(first, first + count)]
    if pipe.abilities.generates_video and pipe.begins_with_text:
        return {"prompt": prompts, "num_frames": 17}
    if pipe.abilities.generates_video:
        given = tiny_cosmos.given(first + count)[first:]
        return {"tokens": given, **({"prompt": prompts} if pipe.transformer.reads_text else {})}
    if pipe.num_classes is None:
        return {"prompt": prompts}
    return {"class_labels": [(3 * i + 1) % tiny.NUM_CLASSES for i in range(first, first + count)]}


def call(pipe, decoding: Decoding | str, count: int = 3, guidance: float = 3.0, *, first: int = 0, **more) -> dict:
    """What a call with every setting of sampling that the family takes gives: its tokens and what they cost. `first`
    numbers the first image."""
    # Tiny models that continue videos are trained without guidance.
    guidance = guidance if pipe.begins_with_text else 1.0
    settings = {"guidance_scale": guidance, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    out = pipe(
        **conditions(pipe, count, first),
        **{name: value for name, value in settings.items() if pipe.abilities.accepts(name)},
        generator=[seeded(i) for i in range(first, first + count)],
        output_type="latent",
        decoding=decoding,
        **more,
    )
    counts = ("forward_passes", "head_calls", "student_passes", "accepted")
    return {"tokens": flat(out.tokens), **{name: getattr(out.stats, name) for name in counts}}


def refilled(pipe, decoding):
    """More images than rows. Flags that are seen late delay those that wait, and so the passes of all together."""
    found = call(pipe, decoding, 7, batch_size=3)
    return {name: found[name] for name in ("tokens", "accepted")}


@contextlib.contextmanager
def fixed_step_times():
    """On which `window=auto` depends, and which no machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculative_jacobi, "step_seconds", lambda *_: {1: 1.0, 4: 1.1, 8: 1.3})
        yield


@cache
def expected(family: str, run: Callable[..., dict], *arguments) -> dict:
    """What `run(pipe, *arguments)` gives on the CPU."""
    with fixed_step_times():
        return run(pipeline(family, "cpu"), *arguments)


def compare(family: str, kind: str, run: Callable[..., dict], *arguments) -> list[str]:
    """How `run(pipe, *arguments)` differs on an accelerator from what it gives on the CPU."""
    on_cpu, pipe = expected(family, run, *arguments), pipeline(family, kind)
    try:
        with card.card(), fixed_step_times():
            return differences(on_cpu, run(pipe, *arguments))
    except Exception as error:
        places = [f"{at.filename}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)]
        place = next((place for place in reversed(places) if "/arimage/" in place), places[-1])
        return [f"{type(error).__name__} at {place}: {error}"]


def differences(expected: dict, found: dict) -> list[str]:
    return [
        f"{key}: {expected[key]} | {found.get(key)}" for key in expected if not equal(expected[key], found.get(key))
    ]


def equal(one, other) -> bool:
    """Continuous tokens differ as they do between batches: a denoising head makes the rounding of its condition
    larger."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one == other
    other = other.elem if isinstance(other, card.OnCard) else other
    if one.is_floating_point():
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-2, atol=1e-2)
    return torch.equal(one, other)
