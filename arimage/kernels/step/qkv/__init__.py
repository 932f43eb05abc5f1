"""Queries, keys and values of a layer in a step."""

from collections.abc import Sequence

import torch

from ...operation import operation
from .. import has_few_rows, has_many_rows
from ..keys import write_keys
from ..linear import lie_together, normalised, product
from ..turns import turned


@operation(writes=("keys", "values"), when=has_few_rows)
def qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    head_dim: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.LongTensor,
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    halves: bool = False,
) -> torch.Tensor:
    """RMSNorm, the product with the weights of queries, keys and values, the rotation of queries and keys, and the
    write of keys and values. Returns the queries [R, heads, head_dim]; those of more than `MOST_ROWS` rows are not
    rotated yet, see `arimage.kernels.step.attention`.

    Args:
        x: [R, D], D a multiple of 64. The rows of an image lie together, and images come once per branch.
        gain, eps: of the norm, [D].
        weights: [(heads + 2 key_heads) head_dim, D] in all, of queries, which may be missing, of keys and of values:
            one weight, or one for each of the three.
        table: the cosines and sines of all positions, float32 [P, turned / 2, 2]. The first `turned` channels of a
            head are rotated.
        positions: int64 [M], where M divides R: those of the first rows, which the others repeat. -1 is the last one.
        keys, values: all those of the layer, [rows, key_heads, places, head_dim], contiguous.
        index: int64 [M], the places to write to, those of the first rows.
        scales: float32, what the rows of `weights` of 8 bits are multiplied by, see `arimage.kernels.step.linear`.
        biases: those of `weights`, or none.
        halves: whether the first half of the `turned` channels is rotated with the second, and not each channel with
            its neighbour.
    """
    states = _products(normalised(x, gain, eps), weights, head_dim, scales, biases)
    if len(states) == 1:
        own = keys.shape[1]
        states = states[0].split([states[0].shape[1] - 2 * own, own, own], dim=1)
    query, key, value = states
    write_keys(key, value, table, positions, keys, values, index, halves)
    return query if has_many_rows(x) else turned(query, table, positions, halves)


@operation(when=has_few_rows)
def unturned(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weights: Sequence[torch.Tensor],
    head_dim: int,
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> torch.Tensor:
    """`qkv` where each head has a norm of its own, before this norm: queries, keys and values, [R, heads + 2
    key_heads, head_dim], which `arimage.kernels.step.attention.normed_attention` takes. Nothing is written."""
    return torch.cat(_products(normalised(x, gain, eps), weights, head_dim, scales, biases), dim=1)


# An operation that changes nothing: inductor fails on one whose changed arguments are all None.
@operation(when=has_few_rows)
def queries(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    table: torch.FloatTensor | None,
    positions: torch.LongTensor,
    head_dim: int,
    scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """`qkv` with a weight of queries only; without a `table` they are not rotated."""
    query = product(normalised(x, gain, eps), weight, scale).unflatten(-1, (-1, head_dim))
    return query if has_many_rows(x) else turned(query, table, positions, False)


def _products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    head_dim: int,
    scales: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """The products with the weights, [R, heads, head_dim] each, or one product where they lie one after another, as
    `fuse_projections` leaves them."""
    if len(weights) > 1 and not scales and not biases and all(map(lie_together, weights, weights[1:])):
        weights = [weights[0].as_strided((sum(map(len, weights)), x.shape[1]), weights[0].stride())]
    states = [product(x, each, scale) for each, scale in zip(weights, scales or [None] * 3, strict=False)]
    if biases:
        states = [state + bias for state, bias in zip(states, biases, strict=True)]
    return [state.unflatten(-1, (-1, head_dim)) for state in states]
