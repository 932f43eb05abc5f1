"""Decoder layers of language models in torch, from their weights, where there are no kernels of a step: without the
modules of transformers."""

from collections.abc import Sequence
from typing import Any

import torch

from ..kernels.linear import linear
from ..kernels.step.gate import gate
from ..kernels.step.linear import lie_together, product
from ..kernels.step.turns import normed_heads
from .layers import attend_heads, rms_norm
from .step_layer import Norm, StepLayer, Weight


def run_layers(
    decoder: Any, parts: Any, hidden: torch.Tensor, positions: torch.LongTensor, mask: torch.Tensor, cache: Any
) -> torch.Tensor:
    """The last hidden states [rows, Q, D] of a decoder, after its norm.

    Args:
        parts: reads a layer of the decoder, see `arimage.models.step_language.parts_of`.
        hidden: its inputs [rows, Q, D].
        positions: [rows, Q] or [axes, rows, Q], as the decoder takes them.
        mask: see `arimage.models.layers.additive`.
        cache: has the prompt, and knows where to write.
    """
    turns = decoder.rotary_emb(hidden, positions)
    for index, layer in enumerate(decoder.layers):
        read = parts(layer)
        hidden = _fed(_attended(hidden, read, turns, mask, cache, index), read)
    return _normed(hidden, Norm(decoder.norm.weight, decoder.norm.variance_epsilon))


def _attended(hidden, layer: StepLayer, turns, mask, cache, index: int) -> torch.Tensor:
    query, key, value = _projected(_normed(hidden, layer.norms[0]), layer, cache.keys[index].shape[1])
    if layer.head_norms is not None:
        pairs = zip((query, key), layer.head_norms, strict=True)
        query, key = (normed_heads(each, norm.weight, norm.bias, norm.eps) for each, norm in pairs)
    heads = query.shape[2]
    query, key = _turned(torch.cat([query, key], dim=2), *turns).tensor_split([heads], dim=2)
    return _added(hidden, attend_heads(query, key, value, mask, cache, index), layer.out, layer.sum_norms, 0)


def _projected(states: torch.Tensor, layer: StepLayer, key_heads: int) -> Sequence[torch.Tensor]:
    """Queries, keys and values [rows, Q, heads of each, head_dim], by one product where their weights lie one after
    another, as `fuse_projections` leaves them."""
    weights = [each.weight for each in layer.projections]
    if layer.projections[0].scale is None and not layer.biases and all(map(lie_together, weights, weights[1:])):
        whole = weights[0].as_strided((sum(map(len, weights)), states.shape[-1]), weights[0].stride())
        heads = linear(states, whole).unflatten(-1, (-1, layer.head_dim))
        return heads.split([heads.shape[2] - 2 * key_heads, key_heads, key_heads], dim=2)
    products = []
    for weight, bias in zip(layer.projections, layer.biases or [None] * 3, strict=True):
        heads = _product(states, weight, bias)
        products.append(heads.unflatten(-1, (-1, layer.head_dim)))
    return products


def _fed(hidden: torch.Tensor, layer: StepLayer) -> torch.Tensor:
    states, gates, up = _normed(hidden, layer.norms[1]), layer.gate, layer.up
    if up is not None and gates.scale is None and lie_together(gates.weight, up.weight):
        both = gates.weight.as_strided((2 * len(up.weight), states.shape[-1]), up.weight.stride())
        gates, up = Weight(both), None
    products = [_product(states, gates)]
    products = products[0].chunk(2, dim=-1) if up is None else [*products, _product(states, up)]
    return _added(hidden, gate(*products), layer.down, layer.sum_norms, 1)


def _added(hidden: torch.Tensor, inner: torch.Tensor, weight: Weight, norms: tuple[Norm, Norm] | None, place: int):
    change = _product(inner, weight)
    return hidden + (change if norms is None else _normed(change, norms[place]))


def _product(states: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    if weight.scale is None:
        return linear(states, weight.weight, bias)
    result = product(states, *weight)
    return result if bias is None else result + bias


def _normed(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    return rms_norm(hidden, norm.weight, norm.eps)


def _turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`states` [rows, Q, heads, head_dim], whose first channels are rotated by `cos` and `sin` [rows, Q, turned], each
    of their first half with one of the second."""
    first, rest = states.tensor_split([cos.shape[-1]], dim=-1)
    one, other = first.chunk(2, dim=-1)
    first = first * cos[:, :, None] + torch.cat([-other, one], dim=-1) * sin[:, :, None]
    return torch.cat([first, rest], dim=-1) if rest.shape[-1] else first
