"""Images that come and go in a batch, calls that are interrupted or watched, and what the host waits for, on
accelerators."""

from itertools import pairwise

import card
import numpy as np
import pytest
import torch
from accelerator.runs import call, compare, conditions, pipeline, refilled
from families import flat, seeded
from PIL import Image

from arimage.decoding import decoding_from_text
from arimage.decoding.run.batch import INTERVAL, Batch, Images, run_batch


QUICK = [
    ("llamagen-text", "ar"),
    ("llamagen-text", "sjd-coupled:window=4"),
    ("var-text", "next-scale"),
    ("mar", "mar"),
    ("halton-maskgit-class", "halton:steps=4"),
    ("llamagen-dd", "few-step:starts=0+3,teacher_start=1"),
    ("latent-llama", "ar"),
]
SLOW = {
    "llamagen-text": [
        "eagle",
        "zipar:window=2",
        "sjd-lazy:window=8,chain=4,tokens=4",
        "sjd-tree:window=6,depth=3",
        "pjd:window=4",
        "line-cache:lines=2",
        "sjd2:window=4,levels=2",
        "sjd-coupled:window=auto",
    ],
    "emu3": ["ar", "sjd-coupled:window=4", "zipar:window=2", "line-cache:lines=2"],
    "emu3.5": ["ar", "sjd-coupled:window=4"],
    "lumina": ["sjd-coupled:window=4"],
    "mammothmoda2": ["ar", "sjd-coupled:window=4"],
    "janus": ["ar"],
    "cosmos-text": ["sjd-coupled:window=4"],
    "cosmos-blocks": ["ar", "sjd-coupled:window=8"],
    "arpg": ["ar", "sjd-coupled:window=4", "groups:groups=4"],
    "randar": ["sjd-coupled:window=4"],
    "lpd": ["groups:groups=4"],
    "var-text": ["code", "next-scale:pruned=0.5+0.5"],
    "infinity": ["next-scale:pruned=0.5+0.5"],
    "mar": ["cspd", "recap", "lazy-mar:first=1"],
    "halton-maskgit-text": ["confidence:steps=4", "recap:steps=6,full_steps=2", "ml-cache:steps=6"],
    "llamagen-dd": ["flow:window=4"],
    "var-dd": ["few-step:starts=0+2"],
    "latent-llama": ["path-jacobi:window=4"],
}
EVERY = [*QUICK, *((name, text) for name in SLOW for text in SLOW[name])]
KINDS = pytest.mark.parametrize(
    "kind", ["replayed", *(pytest.param(k, marks=pytest.mark.slow) for k in ("eager", "xpu"))]
)


def interrupted(pipe, decoding):
    def stop(pipe, step, passes, tensors):
        pipe._interrupt = step == 2

    return call(pipe, decoding, callback_on_step_end=stop)


def watched(pipe, decoding):
    """What a callback sees after every pass. It may see the passes after the end, which an accelerator's host does not
    know of."""
    seen = {}

    def look(pipe, step, passes, tensors):
        seen.update({f"{name} after {passes} passes": value for name, value in tensors.items()})

    inputs = ["tokens", "decided"]
    return call(pipe, decoding, callback_on_step_end=look, callback_on_step_end_tensor_inputs=inputs) | seen


def replaced(pipe, decoding):
    """A callback on the host gives every image another newest token after the second pass."""

    def change(pipe, step, passes, tensors):
        if step != 1:
            return None
        tokens, newest = tensors["tokens"].clone(), tensors["decided"].sum(1, keepdim=True) - 1
        return {"tokens": tokens.scatter(1, newest, 5).cpu(), "decided": tensors["decided"].cpu()}

    inputs = ["tokens", "decided"]
    return call(pipe, decoding, callback_on_step_end=change, callback_on_step_end_tensor_inputs=inputs)


RUNS = (refilled, interrupted, watched)
# By default, two of the quick cases each.
CALLS = [(RUNS[i % 3], *case) for i, case in enumerate(QUICK)]
MORE = [(run, *case) for run in RUNS for case in EVERY if (run, *case) not in CALLS]


@pytest.mark.every(3)
@KINDS
@pytest.mark.parametrize(
    ("run", "family", "decoding"),
    CALLS + [pytest.param(*each, marks=pytest.mark.slow) for each in MORE],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_call_gives_what_it_gives_on_the_cpu(run, family, decoding, kind):
    assert compare(family, kind, run, decoding) == []


@KINDS
@pytest.mark.parametrize(("family", "decoding"), [("llamagen-text", "ar"), ("var-text", "next-scale")])
def test_replaced_tokens_are_those_that_go_on(family, decoding, kind):
    assert compare(family, kind, replaced, decoding) == []


@torch.no_grad()
def arrivals(pipe, decoding, *requests):
    """The tokens and passes of images in one batch of four rows: of each request (steps, count, settings) `count`
    images with settings of their own begin after so many steps of the batch."""
    batch, waiting, found = Batch(decoding_from_text(decoding), 4, pipe.steps_of(pipe.decoding)), list(requests), {}

    def begin(room):
        if not waiting or (batch.running and batch.steps < waiting[0][0]) or room < waiting[0][1]:
            return None
        after, count, settings = waiting.pop(0)
        generators = [seeded(10 * after + i) for i in range(count)]
        prepared = pipe.prepare(**conditions(pipe, count), **dict(settings), generator=generators)
        names = [f"image {i} after {after} steps" for i in range(count)]
        return Images(names, prepared.model, prepared.sampling, prepared.seeds)

    def keep(rows):
        for row in rows:
            found[batch.names[row]] = flat(batch.state.tokens)[row].clone()
            found[f"passes of {batch.names[row]}"] = batch.passes_of([row])

    run_batch(batch, begin, keep, lambda: False)
    return found


SETTINGS = [
    (("guidance_scale", 2.0), ("temperature", 0.5)),
    (("guidance_scale", 5.0), ("top_k", 5), ("min_p", 0.1)),
    (("guidance_scale", 3.0), ("top_p", 0.6)),
]


@pytest.mark.every(2)
@KINDS
@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled:window=4"])
def test_images_of_a_batch_keep_their_sampling_settings(decoding, kind):
    requests = [
        (after, count, settings) for after, count, settings in zip((0, 3, 5), (1, 2, 1), SETTINGS, strict=True)
    ]
    assert compare("llamagen-text", kind, arrivals, decoding, *requests) == []


@pytest.mark.every(2)
@KINDS
@pytest.mark.parametrize(
    ("family", "decoding"),
    [
        ("llamagen-text", "sjd-lazy:window=8,chain=4,tokens=4"),
        ("latent-llama", "ar"),
        pytest.param("llamagen-text", "sjd-coupled:window=4,init=left", marks=pytest.mark.slow),
        pytest.param("latent-llama", "path-jacobi:window=4", marks=pytest.mark.slow),
    ],
)
def test_two_images_join_one(family, decoding, kind):
    assert compare(family, kind, arrivals, decoding, (0, 1, ()), (1, 2, ())) == []


def edit_joins(pipe, decoding, after):
    """An image of which only the lowest rows change joins another after so many steps: it is further than that one."""
    (side, _), *_ = pipe.image_sizes
    mask = np.zeros((side, side), np.uint8)
    mask[-side // 8 :] = 255
    picture = np.random.RandomState(0).randint(256, size=(side, side, 3), dtype=np.uint8)
    edit = ("image", Image.fromarray(picture)), ("mask_image", Image.fromarray(mask))
    return arrivals(pipe, decoding, (0, 1, ()), (after, 1, edit))


@pytest.mark.slow
@pytest.mark.parametrize("after", [5, 8])
@pytest.mark.parametrize("kind", ["eager", "replayed", "xpu"])
def test_an_edit_joins_an_image(kind, after):
    assert compare("arpg-large", kind, edit_joins, "sjd-coupled:window=4", after) == []


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("family", "decoding"),
    [
        ("llamagen-large", "ar"),
        pytest.param("arpg-large", "ar", marks=pytest.mark.slow),
        ("var-text", "next-scale"),
    ],
)
def test_there_is_never_a_second_cache(family, decoding, monkeypatch):
    """Neither when images begin that replace others, nor in a further call."""
    method, begun = type(decoding_from_text(decoding)), []

    def spy(*given, start=method.start):
        state = start(*given)
        begun.append(state.cache.nbytes)
        return state

    monkeypatch.setattr(method, "start", spy)
    pipe = pipeline(family, "replayed")
    with card.card():
        pipe._compiled.clear()
        for _ in range(2):
            call(pipe, decoding, 6, batch_size=3)
        (kept,) = pipe._compiled.kept
    assert len(begun) == 4 and max(begun) < kept.state.cache.nbytes / 2


@pytest.mark.every(2)
@pytest.mark.parametrize(("kind", "decoding"), [("eager", "sjd-coupled:window=4"), ("replayed", "ar")])
def test_the_host_waits_for_the_device_in_every_eighth_pass_only(kind, decoding, monkeypatch):
    # A replay that is compared with an eager step waits.
    monkeypatch.setenv("ARIMAGE_CHECK_GRAPHS", "0")
    waits = []

    def look(pipe, step, passes, tensors):
        waits.append((passes, card.DEVICE.waits.copy()))

    pipe = pipeline.__wrapped__("llamagen-large", kind)
    with card.card():
        call(pipe, decoding, callback_on_step_end=look, callback_on_step_end_tensor_inputs=["tokens", "decided"])
    between = {passes: after - before for (_, before), (passes, after) in pairwise(waits)}
    assert len(between) > 2 * INTERVAL
    # In every eighth pass the host shows how far it is, and after every eighth step it limits attention. Those passes
    # in which images end are not looked at.
    quiet = {passes: each for passes, each in between.items() if passes < 2 * INTERVAL and passes % INTERVAL > 1}
    assert len(quiet) > INTERVAL and not any(quiet.values()), quiet
