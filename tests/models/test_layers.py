"""The attention of the transformers, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from arimage.models.layers import RMSNorm, additive, attend


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("key_value_heads", [4, 2])
@pytest.mark.parametrize("queries", [1, 2, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_its_gradients_are_those_of_pytorch(dtype, queries, key_value_heads, scale):
    torch.manual_seed(0)
    shapes = [(3, 4, queries, 16), (3, key_value_heads, 24, 16), (3, key_value_heads, 24, 16)]
    ours = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    theirs = [part.detach().float().requires_grad_() for part in ours]
    visible = torch.rand(3, queries, 24) < 0.6
    visible[..., 0] = True
    expected = F.scaled_dot_product_attention(
        *theirs, attn_mask=visible[:, None], scale=scale, enable_gqa=key_value_heads == 2
    )
    mask = additive(visible, dtype, 4 // key_value_heads)
    got = attend(*ours, mask, scale)
    with torch.no_grad():
        without_gradients = attend(*ours, mask, scale)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    (got.float() * weight).sum().backward()
    tolerance = {"rtol": 0, "atol": 1e-5 if dtype == torch.float32 else 0.06}
    for actual, wanted in ((got, expected), (without_gradients, expected)):
        torch.testing.assert_close(actual.float(), wanted, **tolerance)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.float(), other.grad, **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 600])
def test_norms_are_those_of_torch_bit_by_bit(rows, dtype):
    hidden = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = RMSNorm(64, 1e-5, dtype=dtype)
    torch.nn.init.uniform_(norm.weight)
    before = hidden.clone()
    with torch.no_grad():
        result = norm(hidden)
    assert torch.equal(result, F.rms_norm(hidden, (64,), norm.weight, 1e-5).detach())
    assert torch.equal(hidden, before)
    # In training.
    assert norm(hidden).requires_grad
