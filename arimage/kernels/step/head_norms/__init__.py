"""The norms and the rotation of queries and keys, and what attention reads, where no other kernel of a step takes them
along."""

import math

import torch
import torch.nn.functional as F

from ...operation import operation
from ...rotary import rotate


@operation(writes=("keys", "values"), whole=("states", "table"))
def head_norms(
    states: torch.Tensor,
    query_gain: torch.Tensor,
    key_gain: torch.Tensor,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    table: torch.FloatTensor,
    past_keys: torch.Tensor,
    past_values: torch.Tensor,
) -> torch.Tensor:
    """An RMSNorm of each head, and a rotation of neighbouring pairs, for any number of rows. The first `first` of the
    past keys and values, and those among `states`, become the `keys` and `values`. Returns the queries [R, T, heads,
    head_dim].

    Args:
        states: [R, T, heads + 2 key_heads, head_dim]: queries, keys and values.
        query_gain, key_gain: [head_dim], of the norms.
        eps: of the norms.
        keys, values: [R, key_heads, first + T, head_dim], contiguous.
        table: the cosines and sines, float32 [R or 1, T, head_dim / 2, 2].
        past_keys, past_values: [R, key_heads, at least `first`, head_dim] of equal strides, whose places are
            contiguous.
    """
    query, key, value = states.split([states.shape[2] - 2 * keys.shape[1], keys.shape[1], keys.shape[1]], dim=2)
    query, key = (
        rotate(F.rms_norm(part, part.shape[-1:], gain, eps), table)
        for part, gain in ((query, query_gain), (key, key_gain))
    )
    for cached, past, own in ((keys, past_keys, key), (values, past_values, value)):
        cached[:, :, :first] = past[:, :, :first]
        cached[:, :, first:] = own.transpose(1, 2)
    return query


@operation(writes=("keys", "values"), whole=("states", "table"))
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
        states: [R, T, 3 heads, head_dim]: queries, keys and values.
        log_scale: [heads], the logarithms of what queries are multiplied by, at most that of 100.
        keys, values: all those of the layer, [rows, heads, places, head_dim], contiguous. The first R rows are
            written, from the place `first` on.
        table: the cosines and sines [R or 1, T, head_dim / 2, 2] that rotate neighbouring pairs; None for no rotation.
    """
    query, key, value = states.unflatten(2, (3, -1)).unbind(2)
    query, key = (F.normalize(part.float(), dim=-1) * length for part in (query, key))
    if table is not None:
        query, key = rotate(query, table), rotate(key, table)
    query = query * log_scale.float().clamp(max=math.log(100.0)).exp()[:, None]
    rows, last = len(states), first + states.shape[1]
    keys[:rows, :, first:last] = key.transpose(1, 2).to(keys.dtype)
    values[:rows, :, first:last] = value.transpose(1, 2)
    return query.to(states.dtype)
