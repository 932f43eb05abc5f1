"""Servers and the demo on a CUDA device capture what they are asked for by default before they are asked."""

from types import SimpleNamespace

import card
import pytest
import torch
from accelerator.runs import fresh, pipeline
from pipelines.cosmos import tiny as tiny_cosmos

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits, Request
from arimage.app.engine.videos import VideoMaker
from arimage.decoding.run.batch import Batch


@pytest.mark.every(2)
@pytest.mark.parametrize("family", ["llamagen-text", "var-text"])
def test_an_engine_is_warm_before_it_is_asked(family):
    pipe = fresh(family)
    with card.card() as device:
        engine = Engine({"model": pipe}, Limits(batch=3))
        try:
            engine.warm_up()
            captures, replays = device.captures, device.replays
            for count in (1, 3):
                assert engine.submit(Request("model", prompt="cat", count=count, seed=3)).result(60).images
            assert 0 < captures == device.captures and device.replays > replays
        finally:
            engine.close()


def test_a_batch_that_does_not_fit_ends_the_warm_up(monkeypatch):
    pipe = fresh()
    with card.card():
        engine, begin = Engine({"model": pipe}, Limits(batch=3)), Batch.begin

        def full(batch, images):
            if len(images.names) == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return begin(batch, images)

        monkeypatch.setattr(Batch, "begin", full)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                engine.warm_up()
            assert engine.waiting == 0 and engine.alive
        finally:
            engine.close()


def test_only_a_cuda_device_is_warmed_up():
    engine = Engine({"model": pipeline("llamagen-text", "cpu")}, Limits(batch=2))
    passes = []
    engine.on_pass = lambda model, images: passes.append(images)
    engine.warm_up()
    engine.close()
    assert passes == []


def test_a_video_maker_is_warm_before_it_is_asked():
    with torch.no_grad():
        pipe = card.move(tiny_cosmos.pipeline("text", begins_with_text=True))
    with card.card() as device:
        VideoMaker({"video": pipe}).warm_up()
        assert device.captures > 0


@pytest.mark.slow
@pytest.mark.parametrize("decoding", ["ar", "sjd-coupled:window=4"])
def test_another_guidance_scale_in_the_demo_captures_nothing(decoding, tmp_path, monkeypatch):
    pytest.importorskip("gradio", reason="the extra `app` is not installed")
    from arimage.app.demo.demo import build_demo

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    with card.card() as device:
        engine = Engine({"model": fresh()}, Limits(batch=3))
        try:
            functions = build_demo(engine).fns.values()
            [generate] = [function.fn for function in functions if function.api_name == "generate"]
            page = SimpleNamespace(session_hash="page", client=None)

            def captures(scale: float) -> int:
                *_, (pictures, _) = generate(page, "cat", decoding=decoding, seed=1, guidance_scale=scale)
                assert len(pictures) == 1
                return device.captures

            first, second = map(captures, (2.0, 5.0))
            assert 0 < first == second < device.replays
        finally:
            engine.close()
