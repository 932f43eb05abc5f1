"""Layers that the transformers of this package share."""

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.linear import linear


class Linear(nn.Linear):
    """`nn.Linear` by `arimage.kernels.linear`."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.weight, self.bias)


def additive(visible: torch.BoolTensor, dtype: torch.dtype) -> torch.Tensor:
    """What queries add to their scores [B, 1, Q, K], for all layers: 0 where a key is `visible` [B, Q, K], -inf elsewhere."""
    return visible.to(dtype).log()[:, None]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` of `query` [B, heads, Q, D] with `key` and `value` [B, key_value_heads, K, D]; `causal`
    is its `is_causal`, in place of a mask."""
    slow = query.device.type == "cpu" and query.dtype != torch.float32
    grouped = key.shape[1] < query.shape[1]
    if slow and query.requires_grad and not grouped and not causal:
        # In training PyTorch's kernel for bfloat16 takes twice as long as plain products, backwards too.
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = (query * scale) @ key.transpose(-1, -2)
        return (scores if mask is None else scores + mask).softmax(-1) @ value
    alone = slow and query.shape[2] == 1
    if alone:
        # PyTorch takes three times as long for one query in bfloat16 as for two.
        query = query.expand(-1, -1, 2, -1).contiguous()
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return attended[:, :, :1] if alone else attended
