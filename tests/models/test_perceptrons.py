"""The head of Janus and the inputs that it makes of image tokens, without transformers' modules."""

import pytest
import torch
from families import EVERY
from steps import allow_steps

from arimage.kernels.linear import int8
from arimage.models import language_heads, language_model
from arimage.models.quantized import QuantizedLinear


CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 0.05, "atol": 0.05}}


def parts_of(pipe):
    parts = pipe.model.model
    return parts.generation_head, parts.generation_aligner


@torch.no_grad()
def logits_of(pipe) -> torch.Tensor:
    ids = torch.tensor([[150, 3, 4, pipe.begin_of_image]])
    model = pipe.prepare(input_ids=ids).model
    cache, first = model.prefill(1)
    tokens = torch.tensor([[1, 5, 2]])
    return torch.cat([first[:, :, None], model.forward(tokens, torch.arange(3)[None], cache)], dim=2)


def hooked(pipe) -> torch.Tensor:
    hooks = [each.register_forward_hook(lambda *_: None) for each in parts_of(pipe)]
    logits = logits_of(pipe)
    for hook in hooks:
        hook.remove()
    return logits


@pytest.fixture
def calls(monkeypatch):
    """One entry for every head or aligner that runs without its module."""
    calls, run = [], language_heads.run_perceptron
    for module in (language_heads, language_model):
        monkeypatch.setattr(module, "run_perceptron", lambda *args: (calls.append(1), run(*args))[1])
    return calls


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_they_give_what_their_modules_give(monkeypatch, calls, dtype, rounded):
    monkeypatch.setattr(int8, "SMALL", 0)
    pipe = EVERY["janus"]().to(dtype)
    if rounded:
        pipe.quantize_weights()
    found = logits_of(pipe)
    assert len(calls) == 3
    calls.clear()
    torch.testing.assert_close(found, hooked(pipe), **CLOSE[dtype])
    assert not calls


def test_modules_that_were_compiled_or_replaced_run_themselves(calls):
    pipe = EVERY["janus"]()
    head, aligner = parts_of(pipe)
    head.compile(backend="eager")
    aligner.activation_fn = torch.nn.SiLU()
    logits_of(pipe)
    assert not calls


def test_8_bits_stay_close_and_leave_other_parts_as_they_are(monkeypatch):
    pipe = EVERY["janus"]()
    full = logits_of(pipe)
    pipe.quantize_weights()
    kinds = {name for name, part in pipe.model.named_modules() if isinstance(part, QuantizedLinear)}
    assert {"model.generation_head.vision_head", "model.generation_aligner.fc1"} <= kinds
    assert not any(name.startswith(("model.vqmodel", "model.vision_model", "lm_head")) for name in kinds)
    rounded = logits_of(pipe)
    assert 0 < (rounded - full).abs().max() < 0.1 * full.std()
    # As on a GPU, where steps read the scales of the head.
    allow_steps(monkeypatch)
    torch.testing.assert_close(logits_of(pipe), rounded, rtol=1e-3, atol=1e-3)
