"""Language models take the kernels of a step, and give the logits of transformers' layers."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from decoders import DECODERS, bind, decoder_of, passes
from families import EVERY, condition_of, seeded
from peft import LoraConfig, get_peft_model
from steps import allow_steps
from torch import nn
from transformers import ChameleonConfig, ChameleonModel

import arimage.kernels.step
from arimage.decoding import AutoregressiveDecoding, Sampling
from arimage.kernels.linear import int8
from arimage.kernels.step import MOST_ROWS
from arimage.models import language_model, step
from arimage.models.fused import Fused
from arimage.models.quantized import QuantizedLinear
from arimage.models.step_language import misfit, misfit_in_torch


CLOSE = {"rtol": 1e-4, "atol": 1e-4}
# Windows, images, branches, and whether a token ends each row of the image.
CASES = [(1, 1, 1, False), (7, 3, 2, False), (16, 1, 2, True), (1, 3, 2, True), (33, 3, 2, True)]


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_give_the_logits_of_the_layers(monkeypatch, kind, case):
    window, batch, branches, row_end = case
    # Positions on several axes go without row ends.
    model = bind(kind, decoder_of(kind), batch, branches, row_end and kind != "glm_image")
    for told in (False, True) if window > 1 else (False,):
        *expected, begun = passes(model, window, told)
        with monkeypatch.context() as patch:
            allow_steps(patch)
            *found, steps = passes(model, window, told)
        assert (begun, steps) == (0, 1)
        torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("most", [MOST_ROWS, 1])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "glm_image"])
def test_weights_of_8_bits_and_fused_ones_give_the_logits_of_the_layers(monkeypatch, kind, most):
    # Where there are kernels, nothing is packed.
    monkeypatch.setattr(int8, "HAS_BYTES", False)
    decoder = decoder_of(kind)
    for layer in decoder.layers:
        if most == 1:
            Fused([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        else:
            for name, part in list(layer.named_modules()):
                if isinstance(part, nn.Linear):
                    layer.set_submodule(name, QuantizedLinear(part, torch.int8))
    model = bind(kind, decoder, 2, 2, False)
    *expected, _ = passes(model, 5)
    allow_steps(monkeypatch)
    monkeypatch.setattr(arimage.kernels.step, "MOST_ROWS", most)
    *found, steps = passes(model, 5)
    assert steps
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_layers_on_a_cpu_give_the_logits_of_their_modules(monkeypatch, kind, case, dtype):
    window, batch, branches, row_end = case
    calls, run_layers = [], language_model.run_layers
    monkeypatch.setattr(language_model, "run_layers", lambda *args: (calls.append(1), run_layers(*args))[1])
    decoder = decoder_of(kind, dtype)
    model = bind(kind, decoder, batch, branches, row_end and kind != "glm_image")
    for told in (False, True) if window > 1 else (False,):
        found = passes(model, window, told)
        assert len(calls) == 3
        calls.clear()
        hook = decoder.layers[0].register_forward_hook(lambda *_: None)
        expected = passes(model, window, told)
        hook.remove()
        assert not calls
        close = CLOSE if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.2}
        torch.testing.assert_close(found, expected, **close)


@pytest.mark.skipif(not int8.HAS_BYTES, reason="the processor does not multiply bytes")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "glm_image"])
def test_layers_on_a_cpu_take_weights_of_8_bits_and_fused_ones(monkeypatch, kind, fused):
    monkeypatch.setattr(int8, "SMALL", 0)
    decoder = decoder_of(kind)
    for layer in decoder.layers:
        if fused:
            Fused([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        else:
            for name, part in list(layer.named_modules()):
                if isinstance(part, nn.Linear):
                    layer.set_submodule(name, QuantizedLinear(part, torch.int8))
    model = bind(kind, decoder, 2, 2, False)
    *found, _ = passes(model, 5)
    monkeypatch.setattr(language_model, "misfit_in_torch", lambda decoder: "modules")
    *expected, _ = passes(model, 5)
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_interpreter_gives_the_logits_of_the_layers(kind, case):
    pytest.importorskip("triton", reason="triton is not installed")
    window, batch, branches, row_end = case
    script = Path(__file__).parents[1] / "interpreted_language.py"
    words = kind, *map(json.dumps, (window, batch, branches, row_end and kind != "glm_image"))
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    told = subprocess.run([sys.executable, script, *words], env=environment, capture_output=True, text=True)
    found = json.loads(told.stdout)
    assert found["steps"] == [0, 1] and max(found["distances"]) < 5e-4


def test_positions_of_images_that_join_are_their_own(monkeypatch):
    allow_steps(monkeypatch)
    for kind in ("llama", "glm_image"):
        model, images = bind(kind, decoder_of(kind), 3, 1, False), torch.tensor([1])
        *expected, _ = passes(model, 3)
        model.put(images, model.take(images))
        *found, _ = passes(model, 3)
        torch.testing.assert_close(found, expected)
        other = model.take(torch.tensor([2, 1]))
        assert len(other._starts) == 2 and other._starts[0] == (model._starts[2] if kind == "llama" else 0)


class Other(nn.Linear):
    """A linear layer of somebody else."""


def patched(decoder, layer):
    mlp = layer.mlp
    mlp.__class__ = type("Patched", (type(mlp),), {"forward": lambda self, hidden: hidden})


def swin(decoder, layer):
    shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "num_attention_heads": 4}
    vq = {"embed_dim": 4, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": []}
    config = ChameleonConfig(**shape, vocabulary_map={"<image>": 63}, vq_config=vq, swin_norm=True)
    return ChameleonModel(config).eval()


REFUSED = {
    "another decoder": lambda decoder, layer: nn.Linear(128, 128),
    "an adapter": lambda decoder, layer: get_peft_model(decoder, LoraConfig(target_modules=["q_proj"])).model,
    "a layer of another kind": lambda decoder, layer: setattr(layer.self_attn, "o_proj", Other(128, 128, bias=False)),
    "an offloaded layer": lambda decoder, layer: setattr(layer, "forward", layer.forward),
    "a patched layer": patched,
    "a hook": lambda decoder, layer: layer.mlp.register_forward_hook(print),
    "a hook of all": lambda decoder, layer: decoder.register_forward_pre_hook(print),
    "a compiled layer": lambda decoder, layer: layer.compile(backend="eager"),
    "another dtype": lambda decoder, layer: layer.mlp.half(),
    "a bias": lambda decoder, layer: setattr(layer.mlp, "down_proj", nn.Linear(192, 128)),
    "another activation": lambda decoder, layer: setattr(layer.mlp, "act_fn", nn.GELU()),
    "one layer of 8 bits": lambda decoder, layer: setattr(
        layer.self_attn, "k_proj", QuantizedLinear(layer.self_attn.k_proj, torch.int8)
    ),
    "norms after layers": swin,
    "training": lambda decoder, layer: decoder.train(),
    "dynamic positions": lambda decoder, layer: setattr(decoder.rotary_emb, "rope_type", "dynamic"),
    "narrow heads": lambda decoder, layer: setattr(layer.self_attn, "head_dim", 16),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_the_layers_in_torch_and_why(monkeypatch, name):
    with torch.no_grad():
        decoder = decoder_of("llama")
        heads = step.HEAD_DIMS
        allow_steps(monkeypatch)
        monkeypatch.setattr(step, "HEAD_DIMS", heads)
        assert misfit(decoder) is None and misfit_in_torch(decoder) is None
        change = REFUSED[name](decoder, decoder.layers[0])
        changed = change if isinstance(change, nn.Module) else decoder
        assert misfit(changed) and misfit_in_torch(changed)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind != "emu3" else kind for kind in DECODERS]
)
def test_a_compiled_step_is_one_graph(monkeypatch, kind):
    allow_steps(monkeypatch)
    found, decoding = [], AutoregressiveDecoding()
    branches = 1 if kind == "glm_image" else 2
    for compile_step in (lambda step: step, partial(torch.compile, backend="eager", fullgraph=True)):
        with torch.no_grad():
            model = bind(kind, decoder_of(kind), 2, branches, kind == "emu3")
            state = decoding.start(model, Sampling(guidance_scale=float(branches)), torch.arange(2))
            take_step = compile_step(decoding.step)
            for _ in range(4):
                take_step(state)
        found.append(state.tokens)
        assert state.cache.finds_ends
    assert torch.equal(*found)


@pytest.mark.parametrize("card", [False, True])
def test_stats_say_why_layers_are_slow(monkeypatch, card):
    pipe = EVERY["janus"]().to(torch.bfloat16)
    if card:
        allow_steps(monkeypatch)
        monkeypatch.setattr(language_model, "DEVICES", {"cpu"})
    layer, steps = pipe.model.model.language_model.layers[0], []
    for change in (lambda: None, lambda: layer.register_forward_hook(lambda *_: None)):
        change()
        steps.append(pipe(**condition_of(pipe), output_type="latent", generator=seeded(0)).stats.steps)
    where = "in torch" if card else "by transformers"
    assert steps == ["eager", f"eager (layers {where}: LlamaDecoderLayer has hooks, or was compiled)"]
