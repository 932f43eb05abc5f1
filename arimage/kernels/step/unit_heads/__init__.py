"""Queries and keys of one length in a step, and their write into the cache."""

import math

import torch
import torch.nn.functional as F

from ...operation import operation
from ...rotary import rotate


@operation(writes=("keys", "values"))
def unit_heads(
    states: torch.Tensor,
    log_scale: torch.Tensor,
    length: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    table: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """Give the queries and keys of all heads the same `length`, rotate both, multiply the queries by those of
    `log_scale` and write the keys and values. Returns the queries [R, T, heads, head_dim].

    Args:
        states: [R, T, 3, heads, head_dim], contiguous: queries, keys and values.
        log_scale: [heads], the logarithms of what queries are multiplied by, at most that of 100.
        keys, values: all those of the layer, [rows, heads, places, head_dim], contiguous. The first R rows are
            written, from the place `first` on.
        table: the cosines and sines [R or 1, T, head_dim / 2, 2] that rotate neighbouring pairs, contiguous; None for
            no rotation.
    """
    both = F.normalize(states[:, :, :2].float(), dim=-1) * length
    if table is not None:
        both = rotate(both.flatten(2, 3), table).unflatten(2, (2, -1))
    query, key = both.unbind(2)
    query = query * log_scale.float().clamp(max=math.log(100.0)).exp()[:, None]
    rows, last = len(states), first + states.shape[1]
    keys[:rows, :, first:last] = key.transpose(1, 2).to(keys.dtype)
    values[:rows, :, first:last] = states[:, :, 2].transpose(1, 2)
    return query.to(states.dtype)
