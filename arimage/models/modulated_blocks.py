"""Layers of next-scale transformers, modulated by their condition."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.linear import linear
from .layers import Linear, attend


NORM_EPS = 1e-6


def block_causal_mask(levels: torch.LongTensor, prefix_mask: torch.BoolTensor | None) -> torch.BoolTensor:
    """The keys that each of P prefix and T image tokens sees, bool [B or 1, 1, P + T, P + T]: image tokens of its own
    scale and of those before (`levels` [T]), and the prefix positions that `prefix_mask` [B, P] shows. The prefix sees
    itself."""
    prefix = 0 if prefix_mask is None else prefix_mask.shape[1]
    levels = F.pad(levels, (prefix, 0), value=-1)
    visible = levels[:, None] >= levels
    if prefix_mask is None:
        return visible[None, None]
    seen = F.pad(prefix_mask, (0, len(levels) - prefix), value=True)
    # Padding would see nothing and become NaN.
    own = torch.eye(len(levels), dtype=torch.bool, device=levels.device)
    return ((visible & seen[:, None]) | own)[:, None]


def layer_norm(hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Normalise `hidden` [B, T, C], then apply the `scale` and `shift` [B, 1, C] of the condition."""
    return torch.addcmul(shift, F.layer_norm(hidden, hidden.shape[-1:], eps=NORM_EPS), scale)


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, qk_norm: bool, dropout: float):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = Linear(hidden_size, 3 * hidden_size)
        self.out_proj = Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        width = hidden_size // num_heads
        # `rms_norm` makes vectors longer than unit vectors by the root of their width.
        self.softmax_scale = 1 / width if qk_norm else 0.25 / math.sqrt(width)
        self.log_query_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(4.0))) if qk_norm else None

    def forward(self, hidden, mask, cache=None, layer=0):
        qkv = self.qkv_proj(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.unbind(2)
        if self.log_query_scale is not None:
            query, key = F.rms_norm(qkv[:, :, :2], qkv.shape[-1:], eps=1e-24).unbind(2)
            query_scale = self.log_query_scale.clamp(max=math.log(100.0)).exp()
            query = query * query_scale[..., 0].to(query.dtype)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))
        if cache is not None:
            key, value = cache.write(layer, key, value)
        hidden = self.out_proj(attend(query, key, value, mask, self.softmax_scale).transpose(1, 2).flatten(2))
        return self.dropout(hidden) if self.training else hidden


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float):
        super().__init__()
        self.fc1 = Linear(hidden_size, intermediate_size)
        self.fc2 = Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        hidden = self.fc2(F.gelu(self.fc1(hidden), approximate="tanh"))
        return self.dropout(hidden) if self.training else hidden


class Offset(nn.Module):
    """A block's own offset to the modulation, for models whose blocks share the layer that computes it."""

    def __init__(self, size: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, shared):
        return shared + self.bias


def parameters(layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.weight, layer.bias


class Float32Linear(nn.Linear):
    def forward(self, hidden):
        return linear(hidden.float(), self.weight.float(), self.bias.float())
