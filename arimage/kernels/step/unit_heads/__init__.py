"""Queries and keys of one length in a step, and their write into the cache."""

import torch

from ... import runs_triton
from . import reference


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
    arguments = states, log_scale, length, keys, values, first, table
    if runs_triton(states):
        from .triton import unit_heads

        return unit_heads(*arguments)
    return reference.unit_heads(*arguments)
