"""Layers of next-scale transformers, modulated by their condition."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.linear import linear
from ..kernels.step import has_many_rows
from ..kernels.step.attention import unit_attention
from ..kernels.step.head_norms import unit_heads
from ..kernels.step.modulated import modulated
from ..kernels.step.modulated_norm import sum_and_norm
from ..kernels.step.modulations import modulations
from .layers import Linear, attend, attend_heads, init_normal


NORM_EPS = 1e-6


def levels_of(counts: Iterable[int], device: torch.device) -> torch.LongTensor:
    """Which of the scales with `counts` tokens each token belongs to, [N]."""
    # Filled on the device, since it is part of some forward passes.
    return torch.cat([torch.full((count,), level, device=device) for level, count in enumerate(counts)])


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


def launch(layer: nn.Linear, rows: torch.Tensor, **options) -> torch.Tensor:
    """What a layer makes of `rows` [R, D] in one launch, with the options of `arimage.kernels.step.modulated`."""
    return modulated(rows, layer.weight, layer.bias, row_scale=getattr(layer, "scale", None), **options)


def modulate(condition: torch.Tensor, layers: Sequence[Any]) -> list[torch.Tensor]:
    """What `layers` make of a `condition` [R, D] by `arimage.kernels.step.modulations`, in one launch, or two if only
    the first have 8 bits."""
    alike = [layer for layer in layers if layer.weight.dtype == layers[0].weight.dtype]
    scales = [layer.scale for layer in alike if layer.scale is not None]
    parts = modulations(condition, [layer.weight for layer in alike], [layer.bias for layer in alike], scales)
    found = list(parts.split([layer.out_features for layer in alike], dim=1))
    return found if len(alike) == len(layers) else found + modulate(condition, layers[len(alike) :])


class Sum(NamedTuple):
    """Hidden states of a step [R, D], and what the next layer makes of them first.

    Attributes:
        rows: the hidden states.
        norm: the options of `arimage.kernels.step.modulated` of the norm before the next layer.
        normed: the outcome of this norm, if it came with the sum; None where it is a part of the next layer.
    """

    rows: torch.Tensor
    norm: dict[str, Any]
    normed: torch.Tensor | None = None

    def add(self, layer: nn.Linear, inner: torch.Tensor, norm: dict[str, Any], gate=None, apart: bool = False) -> Self:
        """The sum with the gated product of `inner`, before another norm. Over many rows this is taken at once, unless
        it is `apart`."""
        if apart or not has_many_rows(inner):
            return type(self)(launch(layer, inner, residual=self.rows, gate=gate), norm)
        rows, normed = sum_and_norm(launch(layer, inner), self.rows, gate, **norm)
        return type(self)(rows, norm, normed)

    def launch(self, layer: nn.Linear, **options) -> torch.Tensor:
        """What the next layer makes of them."""
        if self.normed is not None:
            return launch(layer, self.normed, **options)
        return launch(layer, self.rows, **self.norm, **options)


def modulated_by(scale: torch.Tensor, shift: torch.Tensor) -> dict[str, Any]:
    """`layer_norm` as options of `arimage.kernels.step.modulated`."""
    return {"eps": NORM_EPS, "scale": scale[:, 0], "shift": shift[:, 0]}


def layer_norm(hidden: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Normalise `hidden` [B, T, C], then apply the `scale` and `shift` [B, 1, C] of the condition."""
    return torch.addcmul(shift, F.layer_norm(hidden, hidden.shape[-1:], eps=NORM_EPS), scale)


class Attention(nn.Module):
    """Attention whose queries and keys may have one length, and the queries a learned factor per head.

    Args:
        qk_norm: whether they have.
        first: the class of the layer that makes queries, keys and values.
    """

    def __init__(self, hidden_size: int, num_heads: int, qk_norm: bool, dropout: float, first: type[Linear] = Linear):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = first(hidden_size, 3 * hidden_size)
        self.out_proj = Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)
        width = hidden_size // num_heads
        # `rms_norm` makes vectors longer than unit vectors by the root of their width.
        self.length = width**0.5
        self.softmax_scale = 1 / width if qk_norm else 0.25 / math.sqrt(width)
        self.log_query_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(4.0))) if qk_norm else None

    def forward(self, hidden, mask, cache=None, layer=0, rotary=None):
        qkv = self.qkv_proj(hidden).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = qkv.unbind(2)
        if self.log_query_scale is not None:
            query, key = F.rms_norm(qkv[:, :, :2], qkv.shape[-1:], eps=1e-24).unbind(2)
            query_scale = self.log_query_scale.clamp(max=math.log(100.0)).exp()
            query = query * query_scale[..., 0].to(query.dtype)
        hidden = self.out_proj(attend_heads(query, key, value, mask, cache, layer, self.softmax_scale))
        return self.dropout(hidden) if self.training else hidden

    def step(self, before, gate, after, visible, cache, layer, rotary=None):
        """`forward` of a `Sum` with `qk_norm`, and the residual connection around it, by the kernels of
        `arimage.kernels.step`: the sum before the norm `after`. `gate` is [B, 1, C]. `visible` is the mask, or bool
        [B, P] if the fed cells see all but some of the P tokens of a prompt."""
        assert self.log_query_scale is not None
        states, log_scale = before.launch(self.qkv_proj), self.log_query_scale.flatten()
        states = states.unflatten(1, (3 * self.num_heads, -1))
        keys, values = (cached[: len(gate)] for cached in cache.open(layer, len(gate)))
        if visible is not None and visible.dtype == torch.bool:
            given = log_scale, self.length, self.softmax_scale, keys, values, visible
            attended = unit_attention(states, *given, cache.prefix_end, cache.attended, rotary)
        else:
            states = states.unflatten(0, (len(gate), -1))
            query = unit_heads(states, log_scale, self.length, keys, values, cache.first, rotary).transpose(1, 2)
            key, value = (cached[:, :, : cache.attended] for cached in (keys, values))
            attended = attend(query, key, value, visible, self.softmax_scale).transpose(1, 2)
            attended = attended.reshape(before.rows.shape)
        return before.add(self.out_proj, attended, after, gate[:, 0])


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float, first: type[Linear] = Linear):
        super().__init__()
        self.fc1 = first(hidden_size, intermediate_size)
        self.fc2 = Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden):
        hidden = self.fc2(F.gelu(self.fc1(hidden), approximate="tanh"))
        return self.dropout(hidden) if self.training else hidden

    def step(self, before, gate, after, apart=False):
        """`forward` of a sum and the residual connection around it; see `Attention.step` and `Sum.add`."""
        inner = before.launch(self.fc1, activation="gelu_tanh")
        return before.add(self.fc2, inner, after, gate[:, 0], apart)


class CastingLinear(Linear):
    """Takes inputs of any dtype: that of the weight is known only in its own forward pass if weights are stored in
    another one."""

    def forward(self, hidden):
        return super().forward(hidden.to(self.weight.dtype))


class Block(nn.Module):
    """Attention and a feed-forward layer. A condition modulates both: two gates, two scales and two shifts, [B, 1, C]
    each, which `modulation` makes of it, and then what `between` takes."""

    attention: Attention
    feed_forward: FeedForward
    modulation: nn.Module

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states that the feed-forward layer reads, given those after attention."""
        return hidden

    def step_between(self, attend: Callable[[dict[str, Any]], Sum], norm: dict[str, Any]) -> Sum:
        """`between` by the kernels of `arimage.kernels.step`: the sum before `norm`, given what attention makes before
        any norm."""
        return attend(norm)

    def forward(self, hidden, condition, mask=None, cache=None, layer=0, rotary=None):
        gate1, gate2, scale1, scale2, shift1, shift2, *others = condition
        attended = self.attention(layer_norm(hidden, scale1, shift1), mask, cache, layer, rotary)
        # The residual stream may be in float32 and the weights not.
        hidden = self.between(torch.addcmul(hidden, attended.to(hidden.dtype), gate1), *others)
        return torch.addcmul(hidden, self.feed_forward(layer_norm(hidden, scale2, shift2)).to(hidden.dtype), gate2)

    def step(self, before, condition, after, apart, visible, cache, layer, rotary=None):
        """`forward` of a `Sum` by the kernels of `arimage.kernels.step`: the sum before the norm `after`, in five
        launches over few tokens, nine over many, and those of `step_between`. See `Attention.step` and `Sum.add`."""
        gate1, gate2, _, scale2, _, shift2, *others = condition

        def attend(norm):
            return self.attention.step(before, gate1, norm, visible, cache, layer, rotary)

        between = self.step_between(attend, modulated_by(scale2, shift2), *others)
        return self.feed_forward.step(between, gate2, after, apart)


class Offset(nn.Module):
    """A block's own offset to the modulation, for models whose blocks share the layer that computes it."""

    def __init__(self, size: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, shared):
        return shared + self.bias


def init_modulated(network: Any, *embeddings: nn.Parameter) -> None:
    """Initialise the `blocks` and the `head` of a network for training: N(0, 1 / (3 hidden_size)), also in
    `embeddings`, modulations that start as those of a plain transformer, and a head of zeros."""
    width = network.config.hidden_size
    std = (3 * width) ** -0.5
    init_normal(network, std)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    for embedding in embeddings:
        nn.init.normal_(embedding, std=std)
    for block in network.blocks:
        for name, layer in block.named_modules():
            if name.endswith(("out_proj", "fc2")):
                layer.weight.data.div_((2 * len(network.blocks)) ** 0.5)
        nn.init.ones_(block.modulation.bias[: 2 * width])
    nn.init.zeros_(network.head.weight)


class Float32Linear(nn.Linear):
    def forward(self, hidden):
        return linear(hidden.float(), self.weight.float(), self.bias.float())

    def step(self, before: Sum) -> torch.Tensor:
        """`forward` of a `Sum` by the kernels of `arimage.kernels.step`."""
        return before.launch(self, precise=True)
