"""Queries, keys and values of a layer in a step."""

import torch

from ... import runs_triton
from .. import has_many_rows, many
from . import reference


def qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    head_dim: int,
    keys: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    index: torch.LongTensor | None = None,
    scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """RMSNorm, the product with the weight of queries, keys and values, the rotation of neighbouring pairs of queries
    and keys, and the write of keys and values. Returns the queries [R, heads, head_dim]; those of more than
    `MOST_ROWS` rows are not rotated yet, see `arimage.kernels.step.attention`.

    Args:
        x: [R, D], D a multiple of 64. The rows of an image lie together, and images come once per branch.
        gain, eps: of the norm, [D].
        weight: [(heads + 2 key_heads) head_dim, D], queries first. Without any queries or without `keys` it has the
            others only.
        table: the cosines and sines of all positions, float32 [P, head_dim / 2, 2].
        positions: int64 [M], where M divides R: those of the rows of the first branch, which the others repeat. -1 is
            the last one.
        keys, values: all those of the layer, [rows, key_heads, places, head_dim], contiguous.
        index: int64 [M], the places to write to.
        scale: float32, what the rows of a weight of 8 bits are multiplied by, see `arimage.kernels.step.linear`.
    """
    if has_many_rows(x):
        return many.qkv(x, gain, eps, weight, table, positions, head_dim, keys, values, index, scale)
    if runs_triton(x):
        from .triton import qkv

        return qkv(x, gain, eps, weight, table, positions, head_dim, keys, values, index, scale)
    return reference.qkv(x, gain, eps, weight, table, positions, head_dim, keys, values, index, scale)
