"""Decoder layers of language models in torch, from their weights, where there are no kernels of a step: without the
modules of transformers."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F

from ..kernels.linear import linear
from ..kernels.linear.int8 import PackedWeight, int8_products
from ..kernels.step.gate import gate
from ..kernels.step.linear import lie_together, product
from ..kernels.step.turns import normed_heads
from .layers import attend_heads, rms_norm
from .step_layer import Norm, StepLayer, Weight, norm_of


def run_layers(
    decoder: Any,
    layers: Sequence[StepLayer],
    hidden: torch.Tensor,
    positions: torch.LongTensor,
    mask: torch.Tensor,
    cache: Any,
) -> torch.Tensor:
    """The last hidden states [rows, Q, D] of a decoder, after its norm.

    Args:
        layers: its layers.
        hidden: its inputs [rows, Q, D].
        positions: [rows, Q] or [axes, rows, Q], as the decoder takes them.
        mask: see `arimage.models.layers.additive`.
        cache: knows where to write.
    """
    turns = decoder.rotary_emb(hidden, positions)
    for index, layer in enumerate(layers):
        hidden = _fed(_attended(hidden, layer, turns, mask, cache, index), layer)
    return _normed(hidden, norm_of(decoder.norm))


def run_perceptron(states: torch.Tensor, layers: Sequence[tuple[Weight, torch.Tensor | None]]) -> torch.Tensor:
    """What layers of weights and biases make of `states` [..., D], with a GELU after each but the last."""
    for index, (weight, bias) in enumerate(layers):
        states = F.gelu(states) if index else states
        (states,) = _products(states, [weight], [] if bias is None else [bias])
    return states


def _attended(hidden, layer: StepLayer, turns, mask, cache, index: int) -> torch.Tensor:
    query, key, value = _projected(_normed(hidden, layer.norms[0]), layer)
    if layer.head_norms is not None:
        pairs = zip((query, key), layer.head_norms, strict=True)
        query, key = (normed_heads(each, norm.weight, norm.bias, norm.eps) for each, norm in pairs)
    heads = query.shape[2]
    query, key = _turned(torch.cat([query, key], dim=2), *turns).tensor_split([heads], dim=2)
    return _added(hidden, attend_heads(query, key, value, mask, cache, index), layer.out, layer.sum_norms, 0)


def _projected(states: torch.Tensor, layer: StepLayer) -> Sequence[torch.Tensor]:
    """Queries, keys and values [rows, Q, heads of each, head_dim], by one product where their weights lie one after
    another, as `fuse_projections` leaves them."""
    weights = [each.weight for each in layer.projections]
    if layer.projections[0].scale is None and not layer.biases and all(map(lie_together, weights, weights[1:])):
        whole = weights[0].as_strided((sum(map(len, weights)), states.shape[-1]), weights[0].stride())
        products = linear(states, whole).split(list(map(len, weights)), dim=-1)
    else:
        products = _products(states, layer.projections, layer.biases)
    return [each.unflatten(-1, (-1, layer.head_dim)) for each in products]


def _fed(hidden: torch.Tensor, layer: StepLayer) -> torch.Tensor:
    states, gates, up = _normed(hidden, layer.norms[1]), layer.gate, layer.up
    if up is not None and gates.scale is None and lie_together(gates.weight, up.weight):
        both = gates.weight.as_strided((2 * len(up.weight), states.shape[-1]), up.weight.stride())
        gates, up = Weight(both), None
    products = _products(states, [gates] if up is None else [gates, up])
    products = products[0].chunk(2, dim=-1) if up is None else products
    return _added(hidden, gate(*products), layer.down, layer.sum_norms, 1)


def _added(hidden: torch.Tensor, inner: torch.Tensor, weight: Weight, norms: tuple[Norm, Norm] | None, place: int):
    (change,) = _products(inner, [weight])
    return hidden + (change if norms is None else _normed(change, norms[place]))


def _products(
    states: torch.Tensor, weights: Sequence[Weight], biases: Sequence[torch.Tensor] = ()
) -> list[torch.Tensor]:
    """The products of `states` with some weights, and with a bias each if there are any."""
    if any(each.scale is None for each in weights):
        return [linear(states, each.weight, bias) for each, bias in zip_longest(weights, biases)]
    if all(isinstance(each.weight, PackedWeight) for each in weights):
        products = int8_products(states, weights)
    else:
        products = [product(states, *each) for each in weights]
    return [each + bias for each, bias in zip(products, biases, strict=True)] if biases else products


def _normed(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    return rms_norm(hidden, norm.weight, norm.eps)


def _turned(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`states` [rows, Q, heads, head_dim], whose first channels are rotated by `cos` and `sin` [rows, Q, turned], each
    of their first half with one of the second."""
    first, rest = states.tensor_split([cos.shape[-1]], dim=-1)
    one, other = first.chunk(2, dim=-1)
    first = first * cos[:, :, None] + torch.cat([-other, one], dim=-1) * sin[:, :, None]
    return torch.cat([first, rest], dim=-1) if rest.shape[-1] else first
