"""The engine on accelerators: requests of every kind of model, with settings of their own, some of them cancelled."""

import threading

import card
import numpy as np
import pytest
from accelerator.runs import FAMILIES, PROMPTS
from pipelines.arpg import tiny as tiny_arpg
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.lpd import tiny as tiny_lpd

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Cancelled, Limits, Request


FACTS = ("passes", "head_calls", "seeds", "exact", "decoding", "settings")

# A pipeline, two of its decodings, and whether each image of a batch may have sampling settings of its own.
MODELS = {
    "tokens": (lambda: tiny_llamagen.text_pipeline(), ("ar", "sjd-coupled:window=4"), True),
    "groups": (lambda: tiny_lpd.pipeline(grid=6), ("groups:groups=5", "groups:groups=5"), True),
    "scales": (FAMILIES["var-text"], ("next-scale", "code"), False),
    "vectors": (FAMILIES["llamagen-dd"], ("few-step:starts=0+3", "few-step:starts=0+3"), False),
    "masked latents": (FAMILIES["mar"], ("mar", "mar"), False),
    "masked tokens": (FAMILIES["halton-maskgit-class"], ("halton:steps=4", "confidence:steps=5"), False),
    "causal latents": (FAMILIES["latent-llama"], ("ar", "path-jacobi:window=4"), False),
    "classes": (lambda: tiny_llamagen.class_pipeline(grid=6), ("sjd-tree:window=6,depth=3", "zipar:window=2"), True),
    "any order": (lambda: tiny_arpg.pipeline(grid=6), ("ar", "sjd-coupled:window=4"), True),
    "language model": (FAMILIES["emu3"], ("ar", "sjd-coupled:window=4"), True),
}
SLOW = ("groups", "masked latents", "masked tokens", "causal latents", "classes", "any order", "language model")


def requests(pipe, first: str, second: str, mixed: bool) -> list[Request]:
    """Ten requests of 14 images."""
    asked = [
        {"decoding": first},
        {"decoding": first, "count": 2, "temperature": 0.7, "preview_every": 1},
        {"decoding": second, "top_k": 5},
        {"decoding": second, "count": 3},
        {"decoding": first, "guidance_scale": 1.0},
        {"decoding": first, "guidance_scale": 5.0, "top_p": 0.8},
        {"decoding": second, "guidance_scale": 4.0, "top_k": 9, "min_p": 0.1, "preview_every": 3},
        {"decoding": first, "previews": 2},
        {"decoding": first, "film": True},
        {"decoding": second, "count": 2},
    ]
    settings = () if mixed else ("temperature", "top_k", "top_p", "min_p", "guidance_scale")
    return [
        Request(
            "model",
            seed=i,
            **({"prompt": PROMPTS[i % len(PROMPTS)]} if pipe.num_classes is None else {"class_label": i}),
            **{name: value for name, value in one.items() if name not in settings},
        )
        for i, one in enumerate(asked)
    ]


def served(pipe, asked: list[Request], cancelled: int) -> list:
    """What an engine returns for `asked`, of which one is cancelled after its first pass."""
    engine, submitted, tickets = Engine({"model": pipe}, Limits(batch=4)), threading.Event(), []

    def cancel(progress):
        if progress.passes:
            submitted.wait(60)
            tickets[cancelled].cancel()

    try:
        tickets += [engine.submit(one, cancel if i == cancelled else None) for i, one in enumerate(asked)]
        submitted.set()
        return [ticket.future.exception(60) or ticket.result() for ticket in tickets]
    finally:
        submitted.set()
        engine.close()


def same(images, others) -> bool:
    """Whether images are the same, up to a level of 255 where the rounding of differently shaped products tips it."""
    pairs = zip(images, others, strict=True)
    return all(np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1 for one, other in pairs)


def differences(one, other) -> list[str]:
    if isinstance(one, Exception) or isinstance(other, Exception):
        return [] if isinstance(one, Cancelled) and isinstance(other, Cancelled) else [f"{one!r} | {other!r}"]
    found = [
        f"{name}: {getattr(one, name)} | {getattr(other, name)}"
        for name in FACTS
        if getattr(one, name) != getattr(other, name)
    ]
    # A mean over images in the order in which they were finished.
    if one.tokens_per_pass != pytest.approx(other.tokens_per_pass):
        found.append(f"tokens_per_pass: {one.tokens_per_pass} | {other.tokens_per_pass}")
    if not same(one.images, other.images):
        found.append("images")
    if not np.array_equal(one.deciding_pass, other.deciding_pass):
        found.append("deciding_pass")
    if one.film is not None and (one.film.passes, len(one.film.frames)) != (other.film.passes, len(other.film.frames)):
        found.append(f"film: {one.film.passes} | {other.film.passes}")
    elif one.film is not None and not same(one.film.frames, other.film.frames):
        found.append("frames of the film")
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["replayed", *(pytest.param(k, marks=pytest.mark.slow) for k in ("eager", "xpu"))])
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in MODELS]
)
def test_an_engine_serves_what_it_serves_on_the_cpu(model, kind):
    build, decodings, mixed = MODELS[model]
    pipe, cpu = build(), build()
    asked = requests(cpu, *decodings, mixed)
    # One of several images in a full batch.
    expected = served(cpu, asked, cancelled=1)
    card.move(pipe, "xpu" if kind == "xpu" else "cuda")
    with card.card():
        if kind == "eager":
            pipe.run_eagerly()
        found = served(pipe, asked, cancelled=1)
    different = {i: differences(one, other) for i, (one, other) in enumerate(zip(expected, found, strict=True))}
    assert {i: each for i, each in different.items() if each} == {}
    assert [i for i, one in enumerate(found) if isinstance(one, Exception)] == [1]
