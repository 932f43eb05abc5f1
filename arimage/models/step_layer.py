"""A decoder layer by the kernels of a step, from its weights, wherever modules keep them."""

from typing import Any, NamedTuple

import torch

from ..kernels.step import has_many_rows
from ..kernels.step.attention import attention, normed_attention
from ..kernels.step.linear import linear
from ..kernels.step.norm_and_add import norm_and_add
from ..kernels.step.qkv import qkv, queries, unturned
from .step import StepPlaces


class Norm(NamedTuple):
    """The weights of a norm, with a bias if it is a LayerNorm."""

    weight: torch.Tensor
    eps: float
    bias: torch.Tensor | None = None


class Weight(NamedTuple):
    """A weight, and its scales if it has 8 bits."""

    weight: torch.Tensor
    scale: torch.FloatTensor | None = None


class StepLayer(NamedTuple):
    """What a step reads of a decoder layer.

    Attributes:
        norms: before attention and before the feed-forward layer.
        projections: of queries, keys and values, in one weight or three.
        biases: of the projections, or none.
        head_dim: the width of a head.
        out, gate, up, down: the other weights. `gate` may hold `up` too, after its own rows.
        head_norms: of the heads of queries and keys.
        sum_norms: of what attention and the feed-forward layer add to the hidden states.
    """

    norms: tuple[Norm, Norm]
    projections: tuple[Weight, ...]
    biases: list[torch.Tensor]
    head_dim: int
    out: Weight
    gate: Weight
    up: Weight | None
    down: Weight
    head_norms: tuple[Norm, Norm] | None = None
    sum_norms: tuple[Norm, Norm] | None = None


def weight_of(layer: Any) -> Weight:
    return Weight(layer.weight, getattr(layer, "scale", None))


def norm_of(norm: Any) -> Norm:
    """The weights of a norm of this package or of transformers."""
    return Norm(norm.weight, norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def layer_of(block: Any, *projections: Any, head_norms: tuple[Any, Any] | None = None) -> StepLayer:
    """What a step reads of a block of this package, whose attention has these layers and norms of queries, keys and
    values, and whose feed-forward layer is gated."""
    own, feed = getattr(block, "attention", block), block.feed_forward
    return StepLayer(
        (norm_of(block.attention_norm), norm_of(block.feed_forward_norm)),
        tuple(map(weight_of, projections)),
        [],
        own.head_dim,
        *map(weight_of, (own.out_proj, feed.gate_proj, feed.up_proj, feed.down_proj)),
        head_norms=head_norms and (norm_of(head_norms[0]), norm_of(head_norms[1])),
    )


def attend_layer(
    hidden: torch.Tensor,
    layer: StepLayer,
    at: StepPlaces,
    keys: torch.Tensor,
    values: torch.Tensor,
    writes: bool = True,
) -> torch.Tensor:
    """The rows `hidden` [R, hidden_size] and what attention adds to them, in three launches if they are few, or four
    with `sum_norms`. `keys` and `values` are all those that the cache has of the layer. Those of the rows are written
    to it if the layer `writes`; otherwise its only projection is that of queries."""
    norm, head_dim = layer.norms[0], layer.head_dim
    weights, scales = zip(*layer.projections, strict=True)
    scales = [each for each in scales if each is not None]
    before, turns = (hidden, norm.weight, norm.eps, weights), (at.table, at.positions)
    seen, rest = (keys, values, at.seen, at.prefix_end, at.first, at.slots), (at.halves, at.ends, at.columns)
    if layer.head_norms is None:
        if writes:
            query = qkv(*before, *turns, head_dim, keys, values, at.index, scales, layer.biases, at.halves)
        else:
            query = queries(*before[:3], weights[0], *turns, head_dim, *scales)
        attended = attention(query, *seen, at.visible, *(turns if has_many_rows(hidden) else (None, None)), *rest)
    else:
        states = unturned(*before, head_dim, scales, layer.biases)
        query, key = layer.head_norms
        norms = query.weight, key.weight, query.eps, query.bias, key.bias
        attended = normed_attention(states, *seen, at.index, *turns, *norms, at.visible, *rest)
    return _added(hidden, attended, layer.out, layer.sum_norms and layer.sum_norms[0])


def feed_layer(hidden: torch.Tensor, layer: StepLayer) -> torch.Tensor:
    """The rows `hidden` [R, hidden_size] and what the feed-forward layer adds to them, in two launches if they are
    few, or three with `sum_norms`."""
    norm, gate, up = layer.norms[1], layer.gate, layer.up
    # Only weights on a processor are packed.
    assert up is not None
    both = {"up": up.weight, "scale": gate.scale, "up_scale": up.scale}
    inner = linear(hidden, gate.weight, gain=norm.weight, eps=norm.eps, **both)
    return _added(hidden, inner, layer.down, layer.sum_norms and layer.sum_norms[1])


def _added(hidden: torch.Tensor, inner: torch.Tensor, weight: Weight, norm: Norm | None) -> torch.Tensor:
    """`hidden` and the product of `inner`, after a norm if there is one."""
    if norm is None:
        return linear(inner, weight.weight, residual=hidden, scale=weight.scale)
    return norm_and_add(linear(inner, weight.weight, scale=weight.scale), norm.weight, norm.eps, hidden)
