"""The attention of the transformers, against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from arimage.models.layers import additive, attend


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
