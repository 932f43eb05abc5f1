"""Which forward passes take the kernels of `arimage.kernels.step`, and what they generate."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from runpy import run_path

import pytest
import torch
from families import EVERY, condition_of, flat, seeded
from peft import LoraConfig
from pipelines.llamagen import tiny as tiny_llamagen
from steps import allow_steps, count_layers
from torch import nn

import arimage.kernels.step
from arimage.decoding import AutoregressiveDecoding, Layout, Sampling
from arimage.kernels.step import MOST_ROWS
from arimage.kernels.step.linear import linear
from arimage.models import quantized, step
from arimage.models.quantized import quantize_linears
from arimage.models.step import runs_step
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel, LlamaGenTransformer


SHAPE = {"grid_size": 4, "hidden_size": 128, "intermediate_size": 192, "num_layers": 2, "num_attention_heads": 2}


def transformer(**changes) -> LlamaGenTransformer:
    return LlamaGenTransformer(**{**SHAPE, "vocab_size": 64, "num_classes": 4, **changes}).to(torch.bfloat16).eval()


@pytest.fixture(autouse=True)
def on_a_card(monkeypatch):
    monkeypatch.setattr(step, "has_kernels", lambda weight: True)
    with torch.no_grad():
        yield


class Other(nn.Linear):
    """A linear layer of somebody else, such as one with 4 bits."""


REFUSED = {
    "an adapter": lambda network, block: network.add_adapter(LoraConfig(r=2, target_modules=["qkv_proj"])),
    "a layer of another kind": lambda network, block: setattr(
        block.attention, "out_proj", Other(128, 128, bias=False).to(torch.bfloat16)
    ),
    "an offloaded layer": lambda network, block: setattr(block, "forward", block.forward),
    "a hook of a layer": lambda network, block: block.feed_forward.register_forward_hook(print),
    "a hook of all": lambda network, block: network.register_forward_pre_hook(print),
    "a weight of another dtype": lambda network, block: setattr(
        block.feed_forward, "up_proj", block.feed_forward.up_proj.to(torch.float16)
    ),
    "a compiled network": lambda network, block: torch.compile(network, backend="eager"),
    "a network compiled in place": lambda network, block: network.compile(backend="eager"),
    "training": lambda network, block: network.train(),
    "float32": lambda network, block: network.float(),
    "another network": lambda network, block: nn.Linear(64, 64),
}
SIZES = [{"num_attention_heads": 8}, {"hidden_size": 192}, {"intermediate_size": 200}]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_weights_of_8_bits_take_the_kernels(monkeypatch, dtype):
    network = transformer()
    quantize_linears(network, dtype)
    assert runs_step(network)


@pytest.mark.every(3)
@pytest.mark.parametrize("family", ["llamagen-text", "arpg-places", "randar", "rar-class", "var-class", "infinity"])
def test_steps_by_weights_of_8_bits_give_the_tokens_of_torch(monkeypatch, family):
    pipe = EVERY[family]()
    pipe.quantize_weights()
    call = {**condition_of(pipe), "output_type": "latent", "num_images_per_prompt": 2}
    expected = flat(pipe(**call, generator=seeded(0)).tokens)
    allow_steps(monkeypatch)
    rows = count_layers(monkeypatch)
    assert torch.equal(flat(pipe(**call, generator=seeded(0)).tokens), expected) and rows


def test_a_layer_of_8_bits_reads_its_weight_as_it_is_stored_in_products_of_few_rows(monkeypatch):
    layer, sizes = quantized.QuantizedLinear(nn.Linear(128, 64), torch.int8).to(torch.bfloat16), []
    monkeypatch.setattr(quantized, "has_kernels", lambda weight: weight.dtype == torch.int8)
    monkeypatch.setattr(
        quantized, "linear", lambda x, *rest, **scale: (sizes.append(len(x)), linear(x, *rest, **scale))[1]
    )
    for shape in ((2, 3, 128), (5, 128), (2, 64, 128)):
        hidden = torch.randn(shape).bfloat16()
        full = (layer.weight.float() * layer.scale[:, None]).bfloat16()
        torch.testing.assert_close(layer(hidden), nn.functional.linear(hidden, full, layer.bias), rtol=0.05, atol=0.05)
    assert sizes == [6, 5]


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_the_layers_in_torch(name):
    network = transformer()
    change = REFUSED[name](network, network.blocks[1])
    assert not runs_step(change if isinstance(change, nn.Module) else network)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_narrow_and_uneven_layers_run_in_torch(sizes):
    assert not runs_step(transformer(**sizes))


def test_gradients_and_autocast_take_the_layers_in_torch(monkeypatch):
    with torch.enable_grad():
        assert not runs_step(transformer())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    assert not runs_step(transformer())


@pytest.mark.parametrize(("value", "enabled"), [(None, True), ("1", True), ("0", False)])
def test_a_variable_switches_the_kernels_off(monkeypatch, value, enabled):
    if value is not None:
        monkeypatch.setenv("ARIMAGE_STEP_KERNELS", value)
    assert run_path(arimage.kernels.step.__file__, run_name="arimage.kernels.step.again")["ENABLED"] is enabled
    monkeypatch.setattr(step, "ENABLED", enabled)
    assert runs_step(transformer()) is enabled


def test_fused_projections_take_the_kernels_too(monkeypatch):
    allow_steps(monkeypatch)
    pipe, logits = tiny_llamagen.class_pipeline(), []
    for prepare in (lambda: None, pipe.fuse_projections):
        prepare()
        model = LlamaGenTokenModel(pipe.transformer, {"class_labels": torch.tensor([1, 3])}, Layout((4, 4)))
        cache, _ = model.prefill(2)
        tokens, positions = torch.zeros(2, 3, dtype=torch.long), torch.arange(3).expand(2, -1)
        logits.append(model.forward(tokens, positions, cache))
        assert cache.finds_ends
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.slow), MOST_ROWS])
def test_a_compiled_step_is_one_graph(monkeypatch, most):
    allow_steps(monkeypatch)
    monkeypatch.setattr(arimage.kernels.step, "MOST_ROWS", most)
    network, decoding, found = tiny_llamagen.class_pipeline().transformer, AutoregressiveDecoding(), []
    for compile_step in (lambda step: step, partial(torch.compile, backend="eager", fullgraph=True)):
        model = LlamaGenTokenModel(network, {"class_labels": torch.tensor([1, 3])}, Layout((4, 4)), guided=True)
        state = decoding.start(model, Sampling(guidance_scale=2.0), torch.arange(2))
        take_step = compile_step(decoding.step)
        for _ in range(4):
            take_step(state)
        found.append(state.tokens)
        assert state.cache.finds_ends
    assert torch.equal(*found)


# How many layers take kernels: two in each of three steps and of four scales, and three of a head in two denoising
# steps of each of two tokens.
INTERPRETED = {"emoji-llamagen": 6, "emoji-var": 8, "emoji-latent-llama": 12}


@pytest.mark.slow
@pytest.mark.parametrize("name", INTERPRETED)
def test_the_interpreter_generates_the_tokens_of_torch(name):
    pytest.importorskip("triton", reason="triton is not installed")
    script = Path(__file__).parents[1] / "interpreted_steps.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    told = subprocess.run([sys.executable, script, name], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(told.stdout)
    expected = torch.tensor(found["torch"])
    for kind in ("few", "many"):
        torch.testing.assert_close(torch.tensor(found[kind]), expected, rtol=1e-4, atol=1e-4)
    # Of a prompt with and without a condition.
    assert len(found["rows"]) >= 2 * INTERPRETED[name] and not any(count % 2 for count in found["rows"])
    # Something was generated.
    assert len(expected[0, :4].unique()) > 1
