"""A linear layer gives the same with oneDNN, which is used only where it may replace PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from arimage.kernels import linear as kernel
from arimage.kernels.linear import linear


@pytest.fixture
def calls(monkeypatch):
    """How often oneDNN was called, on any CPU, however small the matrices."""
    monkeypatch.setattr(kernel, "_LEAST_ROWS", 0)
    monkeypatch.setattr(kernel, "_LEAST_WEIGHTS", 0)
    operator, called = torch.ops.mkldnn._linear_pointwise, []
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *a: called.append(1) or operator(*a))
    return called


pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN")
X, WEIGHT, BIAS = torch.randn(3, 2, 20), torch.nn.Parameter(torch.randn(7, 20)), torch.randn(7)


@torch.no_grad()
@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("x", [X, X[0, 0], X[:, 1]], ids=["rows", "vector", "strided"])
def test_onednn_gives_the_same(calls, x, bias):
    torch.testing.assert_close(linear(x, WEIGHT, bias), F.linear(x, WEIGHT, bias), atol=1e-5, rtol=1e-5)
    assert calls == [1]


@pytest.mark.parametrize("trained", [0, 1, 2])
def test_what_needs_gradients_has_them(calls, trained):
    inputs = [tensor.detach().clone() for tensor in (X, WEIGHT, BIAS)]
    inputs[trained].requires_grad_()
    linear(*inputs).sum().backward()
    assert inputs[trained].grad is not None and not calls


@torch.no_grad()
def test_other_dtypes_autocast_and_compilation_keep_their_own(calls):
    linear(X.bfloat16(), WEIGHT.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(X, WEIGHT).dtype == torch.bfloat16
    with torch.backends.mkldnn.flags(enabled=False):
        linear(X, WEIGHT)
    torch.compile(linear, backend="eager", fullgraph=True)(X, WEIGHT)
    assert not calls


@torch.no_grad()
def test_small_products_are_not_worth_the_call(calls, monkeypatch):
    """The sizes alone decide, so that equal weights give equal images on every run."""
    monkeypatch.setattr(kernel, "_LEAST_ROWS", 6)
    monkeypatch.setattr(kernel, "_LEAST_WEIGHTS", WEIGHT.numel())
    linear(X, WEIGHT)
    assert calls == [1]
    linear(X[:, :1], WEIGHT)
    linear(X, WEIGHT[:6])
    assert calls == [1]


@torch.no_grad()
@pytest.mark.parametrize("x", [X, X[0, 0], X[:1, 0], X[:, 1], X[:0]], ids=["rows", "vector", "one", "strided", "none"])
def test_weights_in_bfloat16_that_are_the_first_factor_give_the_same(monkeypatch, x):
    monkeypatch.setattr(kernel, "_HAS_TILES", True)
    x, weight, streamed, calls = x.bfloat16(), WEIGHT.bfloat16(), kernel._streamed, []
    monkeypatch.setattr(kernel, "_streamed", lambda *args: calls.append(1) or streamed(*args))
    product = linear(x, weight)
    torch.testing.assert_close(product, F.linear(x, weight))
    assert product.is_contiguous() and len(calls) == (x.numel() > 0)
    bias = BIAS.bfloat16()
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    linear(torch.randn(65, 20).bfloat16(), weight)
    assert len(calls) == 2 * (x.numel() > 0)
