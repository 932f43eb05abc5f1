"""Products with weights in int8, which few rows read as they are stored on some processors."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from arimage.kernels.linear import int8
from arimage.kernels.linear.int8 import describe, int8_product, most_rows
from arimage.models.quantized import QuantizedLinear


OPERATOR = torch.ops.aten._weight_int8pack_mm.default


class Calls(TorchDispatchMode):
    """Whether the operator ran."""

    def __enter__(self):
        self.ran = False
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran |= func is OPERATOR
        return func(*args, **(kwargs or {}))


@pytest.fixture
def few_rows(monkeypatch):
    """Eight rows read the weight as it is stored, sixteen if it is small, on any CPU."""
    monkeypatch.setattr(int8, "MOST_ROWS", {torch.backends.cpu.get_cpu_capability(): (8, 16)})
    monkeypatch.setattr(int8, "SMALL", 64 * 128)


def layer_of(width=128, out=50, bias=False):
    torch.manual_seed(0)
    return QuantizedLinear(nn.Linear(width, out, bias=bias), torch.int8).to(torch.bfloat16)


def exact(layer, hidden):
    return hidden.double() @ (layer.weight.double() * layer.scale.double()[:, None]).T


def test_the_operator_has_the_arguments_that_it_had():
    assert str(OPERATOR._schema) == "aten::_weight_int8pack_mm(Tensor self, Tensor mat2, Tensor scales) -> Tensor"


@torch.no_grad()
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 8, 16, 17])
def test_products_are_rounded_once(rows):
    layer, hidden = layer_of(), torch.randn(rows, 128).bfloat16()
    product = int8_product(hidden, layer.weight, layer.scale)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), exact(layer, hidden), rtol=2**-8, atol=1e-5)


@torch.no_grad()
def test_a_row_does_not_depend_on_the_others_nor_on_where_it_lies():
    layer, hidden = layer_of(), torch.randn(2, 7, 128).bfloat16()
    product = int8_product(hidden, layer.weight, layer.scale)
    for chosen in ((slice(None), slice(1)), (slice(None), slice(2, 5)), (1,)):
        assert torch.equal(int8_product(hidden[chosen], layer.weight, layer.scale), product[chosen])
    # Aligned loads would end the process.
    elsewhere = torch.empty(hidden.numel() + 1, dtype=torch.bfloat16)[1:].view_as(hidden).copy_(hidden)
    weight = torch.empty(layer.weight.numel() + 1, dtype=torch.int8)[1:].view_as(layer.weight).copy_(layer.weight)
    assert torch.equal(int8_product(elsewhere, weight, layer.scale), product)


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "out", "reads"),
    [
        ((2, 4, 128), 65, True),
        ((9, 128), 65, False),
        ((16, 128), 64, True),
        ((17, 128), 64, False),
        ((2, 24), 64, False),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_size_and_rows_decide(few_rows, shape, out, reads, bias):
    layer, hidden = layer_of(shape[-1], out, bias), torch.randn(shape).bfloat16()
    with Calls() as calls:
        product = layer(hidden)
    assert calls.ran == reads and product.shape == (*shape[:-1], out)
    expected = exact(layer, hidden) + (layer.bias.double() if bias else 0)
    torch.testing.assert_close(product.double(), expected, rtol=2**-6, atol=2**-6)


def test_other_dtypes_gradients_and_compilation_convert_the_weight(few_rows):
    layer, hidden = layer_of(), torch.randn(2, 128)
    leaf = hidden.bfloat16().requires_grad_()
    with Calls() as calls:
        for dtype in (torch.float32, torch.float16):
            assert layer(hidden.to(dtype)).dtype == dtype
        layer(leaf).sum().backward()
    assert not calls.ran and leaf.grad.abs().sum() > 0
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(hidden.bfloat16()), layer(hidden.bfloat16()), rtol=2**-6, atol=2**-6)


def test_a_processor_that_was_not_measured_converts_them(monkeypatch):
    monkeypatch.setattr(int8, "MOST_ROWS", {"AVX512": (8, 16), "AVX2": (8, 8)})
    said = {}
    for capability in ("AVX512", "AVX2", "DEFAULT"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
        said[capability] = most_rows(2**20), most_rows(2**20 + 1), describe()
    assert [each[:2] for each in said.values()] == [(16, 8), (8, 8), (0, 0)]
    assert "up to 8 rows, 16 of up to 1,048,576 weights" in said["AVX512"][2]
    assert "up to 8 rows;" in said["AVX2"][2] and said["DEFAULT"][2] == "converted for every product"
