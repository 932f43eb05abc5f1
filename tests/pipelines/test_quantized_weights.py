"""`pipe.quantize_weights` of every family."""

import pytest
import torch
from accelerate import cpu_offload
from adapters import adapter
from families import EVERY, condition_of, flat, one_of_each_kind, seeded
from pipelines.llamagen import tiny as tiny_llamagen
from torch import nn

from arimage import AutoPipeline
from arimage.models.quantized import DTYPES, QuantizedLinear
from arimage.pipelines.quantized import token_network


DTYPE_OF = {"int8": torch.int8, "float8": torch.float8_e4m3fn}
dtypes = pytest.mark.parametrize("dtype", DTYPE_OF.values(), ids=DTYPE_OF)


def rounded(layer):
    """A plain layer with the weights that `layer` stands for."""
    plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
    plain.weight.data = layer.weight.float() * layer.scale[:, None]
    if layer.bias is not None:
        plain.bias.data = layer.bias.data
    return plain


@dtypes
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_multiplies_by_the_rounded_weights(dtype, bias):
    torch.manual_seed(0)
    full = nn.Linear(64, 48, bias=bias)
    full.weight.data[3] = 0
    full.weight.data[5, 7] = 40.0
    layer, hidden = QuantizedLinear(full, dtype), torch.randn(2, 5, 64)
    assert layer.weight.dtype == dtype and layer.scale.shape == (48,)
    torch.testing.assert_close(layer(hidden), rounded(layer)(hidden))
    error = (rounded(layer).weight - full.weight).abs().amax(1)
    largest = full.weight.abs().amax(1)
    # Half a step of int8; float8 has 3 bits after the leading one.
    assert (error <= largest * (0.51 / 127 if dtype == torch.int8 else 1 / 16)).all()
    assert (layer.weight.float().abs().amax(1)[[0, 5]] == DTYPES[dtype]).all() and not layer.weight[3].float().any()


@pytest.mark.parametrize("autocast", [False, True])
@dtypes
def test_a_layer_in_float16_is_as_large_as_its_weights(dtype, autocast):
    torch.manual_seed(0)
    full = nn.Linear(256, 64, bias=False)
    full.weight.data[0] *= 2**-14
    full.weight.data[1] *= 2**9
    layer, hidden = QuantizedLinear(full, dtype), 16 * torch.randn(4, 256)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        product = layer(hidden if autocast else hidden.half())
    expected = hidden.half().float() @ rounded(layer).weight.T
    torch.testing.assert_close(product.float(), expected, rtol=2e-3, atol=2e-2)


@dtypes
def test_a_layer_keeps_its_bits_when_it_is_moved(dtype):
    layer = QuantizedLinear(nn.Linear(64, 48), dtype)
    weight, scale = layer.weight.clone(), layer.scale.clone()
    layer.to(torch.bfloat16)
    assert torch.equal(layer.weight.view(torch.uint8), weight.view(torch.uint8)) and torch.equal(layer.scale, scale)
    assert layer.bias.dtype == torch.bfloat16 and layer(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16
    assert layer.to("meta").weight.is_meta


@pytest.mark.every(4)
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_every_family_generates_with_rounded_weights(family):
    pipe, reference = EVERY[family](), EVERY[family]()
    pipe.quantize_weights()
    network, full = token_network(pipe)[1], token_network(reference)[1]
    layers = {name: part for name, part in network.named_modules() if isinstance(part, QuantizedLinear)}
    assert len(layers) >= 2
    for name, layer in layers.items():
        full.get_submodule(name).weight.data = rounded(layer).weight.data
    call = {**condition_of(pipe), "output_type": "latent"}
    tokens, expected = (flat(each(**call, generator=seeded(0)).tokens) for each in (pipe, reference))
    if tokens.is_floating_point():
        torch.testing.assert_close(tokens, expected, rtol=1e-3, atol=1e-3)
    else:
        assert (tokens == expected).float().mean() > 0.95


@dtypes
@pytest.mark.parametrize("family", one_of_each_kind(EVERY))
def test_quantised_parameters_are_counted_and_the_dtype_stays(family, dtype):
    pipe = EVERY[family]().to(torch.bfloat16)
    network = token_network(pipe)[1]
    before = pipe.dtype, network.dtype, network.num_parameters(), set(network.state_dict())
    pipe.quantize_weights(dtype)
    assert (pipe.dtype, network.dtype, network.num_parameters()) == before[:3]
    assert before[3] <= set(network.state_dict())


@dtypes
def test_quantised_weights_are_offloaded_layer_by_layer(dtype):
    pipe = tiny_llamagen.text_pipeline()
    pipe.quantize_weights(dtype)
    network, call = pipe.transformer, {"prompt": "a red heart", "output_type": "latent"}
    expected = pipe(**call, generator=seeded(0)).tokens
    cpu_offload(network, torch.device("cpu"), offload_buffers=False)
    layers = [part for part in network.modules() if isinstance(part, QuantizedLinear)]
    assert layers and all(layer.weight.is_meta for layer in layers)
    assert torch.equal(pipe(**call, generator=seeded(0)).tokens, expected)
    assert all(layer.weight.is_meta for layer in layers)


def test_what_cannot_be_quantised_is_refused_before_anything_changes():
    pipe = tiny_llamagen.text_pipeline()
    with pytest.raises(ValueError, match=r"dtype is torch.bfloat16: give torch.int8 or torch.float8_e4m3fn"):
        pipe.quantize_weights(torch.bfloat16)
    pipe.load_lora_weights(adapter(pipe))
    with pytest.raises(ValueError, match="the transformer has adapters"):
        pipe.quantize_weights()
    pipe.unload_lora_weights()
    pipe.fuse_projections()
    with pytest.raises(ValueError, match="call unfuse_projections before quantize_weights"):
        pipe.quantize_weights()
    pipe.unfuse_projections()
    pipe.quantize_weights(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="no plain linear layers"):
        pipe.quantize_weights()
    with pytest.raises(ValueError, match="quantised"):
        pipe.fuse_projections()


def test_a_packaged_model_keeps_half_of_the_bytes_of_its_layers():
    pipe = AutoPipeline.from_pretrained("emoji-llamagen", dtype=torch.bfloat16)

    def held():
        network = pipe.transformer
        return sum(each.nbytes for each in (*network.parameters(), *network.buffers()))

    before = held()
    pipe.quantize_weights()
    assert held() < 0.6 * before


def test_quantised_weights_are_neither_saved_nor_adapted(tmp_path):
    pipe = tiny_llamagen.text_pipeline()
    pipe.quantize_weights()
    with pytest.raises(ValueError, match="call save_pretrained before quantize_weights"):
        pipe.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="call load_lora_weights before quantize_weights"):
        pipe.load_lora_weights(adapter(tiny_llamagen.text_pipeline()))
