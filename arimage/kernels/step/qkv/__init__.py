"""Queries, keys and values of a layer in a step."""

import torch

from ...operation import operation
from ...rotary import rotate
from .. import has_few_rows, has_many_rows
from ..keys import write_keys
from ..linear import normalised, product


@operation(writes=("keys", "values"), when=has_few_rows)
def qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    head_dim: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.LongTensor,
    scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """RMSNorm, the product with the weight of queries, keys and values, the rotation of neighbouring pairs of queries
    and keys, and the write of keys and values. Returns the queries [R, heads, head_dim]; those of more than
    `MOST_ROWS` rows are not rotated yet, see `arimage.kernels.step.attention`.

    Args:
        x: [R, D], D a multiple of 64. The rows of an image lie together, and images come once per branch.
        gain, eps: of the norm, [D].
        weight: [(heads + 2 key_heads) head_dim, D], queries first, of which there may be none.
        table: the cosines and sines of all positions, float32 [P, head_dim / 2, 2].
        positions: int64 [M], where M divides R: those of the rows of the first branch, which the others repeat. -1 is
            the last one.
        keys, values: all those of the layer, [rows, key_heads, places, head_dim], contiguous.
        index: int64 [M], the places to write to.
        scale: float32, what the rows of a weight of 8 bits are multiplied by, see `arimage.kernels.step.linear`.
    """
    states = product(normalised(x, gain, eps), weight, scale).unflatten(-1, (-1, head_dim))
    query, rest = states.tensor_split([states.shape[1] - 2 * keys.shape[1]], dim=1)
    write_keys(rest, table, positions, keys, values, index)
    return query if has_many_rows(x) else _rotated(query, table, positions)


# An operation that changes nothing: inductor fails on one whose changed arguments are all None.
@operation(when=has_few_rows)
def queries(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    head_dim: int,
    scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """`qkv` with a weight of queries only."""
    query = product(normalised(x, gain, eps), weight, scale).unflatten(-1, (-1, head_dim))
    return query if has_many_rows(x) else _rotated(query, table, positions)


def _rotated(query: torch.Tensor, table: torch.FloatTensor, positions: torch.LongTensor) -> torch.Tensor:
    return rotate(query[None], table[positions].repeat(len(query) // len(positions), 1, 1)[None])[0]
