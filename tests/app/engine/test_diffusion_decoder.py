"""The engine with a pipeline that decodes its tokens by a diffusion decoder."""

import threading
import time

import numpy as np
import pytest
import torch
from families import seeded
from pipelines.glm_image import tiny as tiny_glm_image
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2

from arimage.app.engine import engine as engine_module
from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Cancelled, Limits, Refused, Request, seeds_of


@pytest.fixture(scope="module")
def loaded():
    return tiny_glm_image.pipeline()


@pytest.fixture
def pipe(loaded):
    """A pipeline whose `denoise` a test may replace."""
    yield loaded
    vars(loaded).pop("denoise", None)


@pytest.fixture
def engine(pipe):
    engine = Engine({"glm": pipe})
    yield engine
    engine.close()


class Held:
    """Holds every run of a decoder."""

    def __init__(self, pipe):
        self.go, self.entered, self._denoise = threading.Event(), threading.Event(), pipe.denoise
        pipe.denoise = self

    def __call__(self, *arguments):
        self.entered.set()
        assert self.go.wait(60)
        return self._denoise(*arguments)


def pixels(image):
    return np.asarray(image).astype(int)


def test_images_are_those_of_the_pipeline(engine, pipe):
    request = Request("glm", prompt="a red heart", count=2, seed=5, num_inference_steps=3, guidance_scale=2.0)
    result = engine.submit(request).result(60)
    generator = [seeded(seed) for seed in seeds_of(5, 2)]
    settings = {"num_inference_steps": 3, "guidance_scale": 2.0, "num_images_per_prompt": 2}
    expected = pipe("a red heart", generator=generator, **settings).images
    assert all(abs(pixels(one) - pixels(other)).max() <= 1 for one, other in zip(result.images, expected, strict=True))
    info = engine.models["glm"]
    assert (info.sampling["guidance_scale"], info.sampling["num_inference_steps"]) == (1.5, 2)
    assert (result.settings["num_inference_steps"], result.settings["guidance_scale"]) == (3, 2.0)
    assert info.grid == (2, 1) and result.deciding_pass.shape == (2, 2, 1)


def test_tokens_and_decoder_may_have_guidance_of_their_own():
    pipe = tiny_mammothmoda2.pipeline()
    engine = Engine({"mammoth": pipe})
    settings = {"guidance_scale": 3.0, "decoder_guidance_scale": 2.0, "negative_prompt": "blurry"}
    request = Request("mammoth", prompt="a red heart", seed=5, decoding="sjd-coupled:window=4", **settings)
    result = engine.submit(request).result(60)
    with pytest.raises(Refused, match="decoder_guidance_scale is 101: give at most 100"):
        engine.submit(Request("mammoth", prompt="a", decoder_guidance_scale=101))
    engine.close()
    (image,) = pipe("a red heart", generator=[seeded(5)], decoding="sjd-coupled:window=4", **settings).images
    assert abs(pixels(result.images[0]) - pixels(image)).max() <= 1
    assert {name: result.settings[name] for name in settings} == settings
    assert result.settings["num_inference_steps"] == 2 and result.deciding_pass.shape == (1, 3, 4)


def test_tokens_of_others_are_generated_while_an_image_is_decoded(engine, pipe):
    held, passes = Held(pipe), []
    engine.on_pass = lambda model, images: passes.append(images)
    first = engine.submit(Request("glm", prompt="a red heart"))
    assert held.entered.wait(60)
    count, decided = len(passes), threading.Event()
    second = engine.submit(
        Request("glm", prompt="red"), lambda now: decided.set() if now.decided == now.tokens else None
    )
    assert decided.wait(60) and len(passes) > count
    assert not first.future.done() and not second.future.done()
    held.go.set()
    assert first.result(60).seconds > 0 and second.result(60).images


def test_a_failing_decoder_ends_only_its_request(engine, pipe):
    denoise = pipe.denoise

    def fails(call, *arguments):
        if call.conditions[0].text == "red":
            raise ValueError("the decoder is broken")
        return denoise(call, *arguments)

    pipe.denoise = fails
    tickets = [engine.submit(Request("glm", prompt=prompt)) for prompt in ("a red heart", "red")]
    assert tickets[0].result(60).images
    with pytest.raises(Refused, match="the decoder is broken"):
        tickets[1].result(60)


def test_what_fails_after_the_decoder_ends_the_request_too(engine, monkeypatch):
    def fails(*arguments):
        raise RuntimeError("no metadata")

    monkeypatch.setattr(engine_module, "notes_of", fails)
    with pytest.raises(RuntimeError, match="no metadata"):
        engine.submit(Request("glm", prompt="red")).result(60)


def test_a_decoder_whose_device_fails_ends_the_warm_up(engine, pipe, monkeypatch):
    def fails(*arguments):
        raise torch.AcceleratorError("CUDA error: illegal access")

    pipe.denoise = fails
    monkeypatch.setattr(engine, "captures", lambda model: True)
    monkeypatch.setattr(engine, "until_captured", lambda model: [None])
    with pytest.raises(torch.AcceleratorError, match="illegal access"):
        engine.warm_up()


def test_closing_cancels_images_that_wait_for_the_decoder(pipe):
    engine, held = Engine({"glm": pipe}), Held(pipe)
    tickets = [engine.submit(Request("glm", prompt=prompt)) for prompt in ("a red heart", "red")]
    assert held.entered.wait(60)
    threading.Timer(0.5, held.go.set).start()
    engine.close()
    for ticket in tickets:
        with pytest.raises(Cancelled):
            ticket.result(0)


def test_previews_and_films_show_the_grid(engine):
    seen = []
    request = Request("glm", prompt="a red heart", previews=2, film=True, decoding="sjd-coupled:window=8")
    result = engine.submit(request, lambda now: seen.extend(now.previews or [])).result(60)
    assert len(seen) >= 2 and all(image.size == (32, 64) for image in seen)
    assert len(result.film.frames) > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_inference_steps": 0}, "num_inference_steps is 0: give at least 1"),
        ({"num_inference_steps": 1001}, "num_inference_steps is 1001"),
        ({"negative_prompt": "x"}, "does not accept negative_prompt"),
        ({"decoder_guidance_scale": 2.0}, "does not accept decoder_guidance_scale: leave it out"),
        ({"prompt": "x <|image|>"}, "special token"),
    ],
)
def test_what_the_model_does_not_take_is_refused(engine, settings, message):
    with pytest.raises(Refused, match=message):
        engine.submit(Request(**{"model": "glm", "prompt": "red"} | settings)).result(60)


def test_images_that_wait_for_the_decoder_are_bounded(pipe):
    engine, held = Engine({"glm": pipe}, Limits(batch=2, queue=4)), Held(pipe)
    tickets = []
    with pytest.raises(Refused) as refused:
        while len(tickets) < 40:
            ticket = engine.submit(Request("glm", prompt="red", seed=len(tickets)))
            tickets.append(ticket)
            while len(tickets) <= 2 and not ticket.finished.image_passes:
                time.sleep(0.01)
    assert refused.value.busy and len(tickets) == 2 + 4
    held.go.set()
    assert all(ticket.result(60).images for ticket in tickets)
    engine.close()


@pytest.mark.parametrize(
    ("error", "before"),
    [(torch.AcceleratorError("CUDA error: illegal access"), 0), (RuntimeError("CUDA error: EXECUTION_FAILED"), 2)],
)
def test_a_decoder_that_fails_always_ends_the_engine(engine, pipe, monkeypatch, error, before):
    monkeypatch.setattr(engine_module, "FAILURES", 2)

    def fails(*arguments):
        raise error

    pipe.denoise = fails
    for _ in range(before):
        with pytest.raises(RuntimeError, match="CUDA"):
            engine.submit(Request("glm", prompt="red")).result(60)
    with pytest.raises(Cancelled):
        engine.submit(Request("glm", prompt="red")).result(60)
    assert not engine.alive and "CUDA" in str(engine.failure)
