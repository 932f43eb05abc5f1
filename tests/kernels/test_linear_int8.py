"""Products with weights in int8, which processors read as they are stored or multiply as bytes."""

import copy

import pytest
import torch
from torch import nn

from arimage.kernels.linear import int8
from arimage.kernels.linear.int8 import (
    BYTES,
    HAS_BYTES,
    PackedWeight,
    describe,
    stored_product,
    takes_bytes,
    takes_stored,
)
from arimage.models.quantized import QuantizedLinear


OPERATOR = torch.ops.onednn.qlinear_pointwise.default
PRECISE = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 4e-6}
packed_here = pytest.mark.skipif(not HAS_BYTES, reason="the processor does not multiply bytes")


def layer_of(width=128, out=50, bias=False):
    torch.manual_seed(0)
    return QuantizedLinear(nn.Linear(width, out, bias=bias), torch.int8)


@pytest.fixture
def large(monkeypatch):
    """All weights count as large."""
    monkeypatch.setattr(int8, "SMALL", 0)


def exact(layer, hidden):
    return hidden.double() @ (layer.weight.double() * layer.scale.double()[:, None]).T


def test_the_operators_have_the_arguments_that_they_had():
    stored = torch.ops.aten._weight_int8pack_mm.default
    assert str(stored._schema) == "aten::_weight_int8pack_mm(Tensor self, Tensor mat2, Tensor scales) -> Tensor"
    assert str(OPERATOR._schema) == (
        "onednn::qlinear_pointwise(Tensor qx, float x_scale, int x_zero_point, Tensor qw, Tensor w_scale, "
        "Tensor w_zero_point, Tensor? bias, float output_scale, int output_zero_point, ScalarType? output_dtype, "
        "str post_op_name, Scalar?[] post_op_args, str post_op_algorithm) -> Tensor"
    )


@packed_here
@pytest.mark.usefixtures("large")
@torch.no_grad()
@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 129, 300])
def test_products_are_rounded_once(rows, dtype):
    layer, hidden = layer_of().to(dtype), torch.randn(rows, 128).to(dtype)
    hidden[:1], hidden[1:2, 5] = 0, 100
    expected = exact(layer, hidden)
    assert takes_bytes(hidden, layer.weight)
    product = layer(hidden)
    assert product.dtype == dtype and isinstance(layer.weight, PackedWeight)
    atol = 4 * PRECISE[dtype] * float(expected.abs().mean()) if rows else 0
    torch.testing.assert_close(product.double(), expected, rtol=PRECISE[dtype], atol=atol)


@packed_here
@pytest.mark.usefixtures("large")
@torch.no_grad()
@pytest.mark.parametrize("dtype", BYTES, ids=str)
def test_a_row_does_not_depend_on_the_others_nor_on_how_many_there_are(dtype):
    layer, hidden = layer_of(), torch.randn(2, 150, 128).to(dtype)
    product = layer(hidden)
    for chosen in ((slice(None), slice(1)), (slice(None), slice(2, 5)), (1,), (1, slice(100, 101))):
        assert torch.equal(layer(hidden[chosen]), product[chosen])


@packed_here
@pytest.mark.usefixtures("large")
@torch.no_grad()
def test_sums_of_the_largest_bytes_do_not_overflow():
    full = nn.Linear(16384, 8, bias=False)
    full.weight.data.fill_(-0.5)
    hidden = torch.full((2, 16384), -3.0)
    layer = QuantizedLinear(full, torch.int8)
    torch.testing.assert_close(layer(hidden).double(), exact(layer, hidden), rtol=1e-6, atol=0)


@packed_here
@pytest.mark.usefixtures("large")
@torch.no_grad()
def test_a_packed_weight_is_read_as_it_was():
    layer, hidden = layer_of(bias=True), torch.randn(3, 128)
    weight = layer.weight.clone()
    product = layer(hidden)
    assert layer.weight.shape == weight.shape and layer.weight.nbytes == weight.nbytes
    assert torch.equal(layer.weight, weight) and torch.equal(layer.weight[3:5].float(), weight[3:5].float())
    assert torch.equal(copy.deepcopy(layer)(hidden), product) and torch.equal(layer.to("cpu")(hidden), product)
    assert layer.to(torch.bfloat16)(hidden.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="not written to"):
        layer.weight.zero_()
    assert type(layer.to("meta").weight) is nn.Parameter


@packed_here
@pytest.mark.usefixtures("large")
def test_gradients_and_other_processors_convert_the_weight(monkeypatch):
    layer, hidden = layer_of(), torch.randn(2, 128)
    with torch.no_grad():
        product = layer(hidden)
    leaf = hidden.clone().requires_grad_()
    converted = layer(leaf)
    converted.sum().backward()
    assert leaf.grad.abs().sum() > 0
    torch.testing.assert_close(converted.detach(), product)
    assert "more than that are multiplied as bytes" in describe()
    monkeypatch.setattr(int8, "HAS_BYTES", False)
    monkeypatch.setattr(int8, "STORED_ROWS", {})
    fresh = layer_of()
    with torch.no_grad():
        torch.testing.assert_close(fresh(hidden), product)
    assert type(fresh.weight) is nn.Parameter and describe() == "converted for every product"


@torch.no_grad()
def test_small_weights_are_read_as_they_are_stored_in_products_of_few_rows(monkeypatch):
    monkeypatch.setattr(int8, "STORED_ROWS", {torch.backends.cpu.get_cpu_capability(): 8})
    layer, hidden = layer_of().to(torch.bfloat16), torch.randn(2, 7, 128).bfloat16()
    expected = exact(layer, hidden)
    assert takes_stored(hidden[:, :4], layer.weight) and not takes_stored(hidden, layer.weight)
    for chosen in ((slice(None), slice(1)), (slice(None), slice(2, 5)), (1,)):
        torch.testing.assert_close(layer(hidden[chosen]).double(), expected[chosen], rtol=2**-8, atol=1e-5)
    assert "up to 8 rows" in describe() and type(layer.weight) is nn.Parameter
    # Aligned loads would end the process.
    elsewhere = torch.empty(129, dtype=torch.bfloat16)[1:].copy_(hidden[0, 0])
    assert torch.equal(stored_product(elsewhere, layer.weight, layer.scale), layer(hidden[0, 0]))
    for other in (hidden.float(), hidden[..., :24], hidden[:1].clone().requires_grad_()):
        assert not takes_stored(other, layer.weight)
    monkeypatch.setattr(int8, "SMALL", layer.weight.numel() - 1)
    assert not takes_stored(hidden[:1], layer.weight)


@packed_here
@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_compiled_layers_give_the_same(packed):
    layer, hidden = layer_of(), torch.randn(2, 128)
    expected = copy.deepcopy(layer)(hidden)
    if packed:
        layer(hidden)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(hidden), expected)
