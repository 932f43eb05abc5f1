"""Calls on a real GPU give what they give on the CPU, up to rounding."""

from contextlib import contextmanager

import pytest
import torch
from accelerator.runs import FAMILIES, call, equal, expected, small

from arimage.decoding import PRESETS


pytestmark = pytest.mark.gpu


def on_gpu(family, form):
    pipe = FAMILIES[family]().to("cuda")
    pipe.set_progress_bar_config(disable=True)
    if form == "eager":
        pipe.run_eagerly()
    return pipe


@pytest.mark.parametrize("form", ["eager", "captured"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_preset_of_every_family(family, form):
    pipe, different = on_gpu(family, form), {}
    # Acceptances differ in a few operators: one of them stands for all.
    for name in pipe.decoding_names:
        if name == "lantern" or "acceptance" not in PRESETS[name].settings:
            on_cpu, found = expected(family, call, small(name)), call(pipe, small(name))
            tokens, others = on_cpu["tokens"], found["tokens"].to("cpu")
            # Tokens that are almost equally likely may be told apart by rounding.
            images = sum(equal(one, other) for one, other in zip(tokens, others, strict=True))
            if images < len(tokens) - 1 or not torch.isfinite(others).all():
                different[name] = images
    assert not different


@pytest.mark.parametrize("form", ["eager", "captured"])
@pytest.mark.parametrize("family", ["llamagen-text", "arpg", "var-class", "mar", "halton-maskgit-class", "glm-image"])
def test_rows_are_refilled(family, form):
    pipe = on_gpu(family, form)
    name = small(pipe.decoding_names[0])
    tokens, others = call(on_gpu(family, "eager"), name, 7)["tokens"], call(pipe, name, 7, batch_size=3)["tokens"]
    assert sum(equal(one, other) for one, other in zip(tokens.cpu(), others.cpu(), strict=True)) >= 6


@pytest.mark.parametrize("family", ["llamagen-text", "var-class", "arpg"])
def test_memory_stays_flat_over_many_calls(family):
    pipe, held = on_gpu(family, "captured"), []
    for _ in range(40):
        call(pipe, small(pipe.decoding_names[0]))
        held.append(torch.cuda.memory_reserved())
    assert held[-1] == held[10]


def test_a_call_goes_on_eagerly_when_a_capture_fails(monkeypatch):
    pipe, capture, failed = on_gpu("llamagen-text", "captured"), torch.cuda.graph, []

    @contextmanager
    def fails(*arguments, **options):
        with capture(*arguments, **options):
            yield
            failed.append(None)
            # CUDA does not permit to wait in a capture.
            torch.cuda.current_stream().synchronize()

    monkeypatch.setattr(torch.cuda, "graph", fails)
    found = call(pipe, small("sjd-coupled"))
    assert failed and torch.equal(
        found["tokens"].cpu(), call(on_gpu("llamagen-text", "eager"), small("sjd-coupled"))["tokens"].cpu()
    )
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
