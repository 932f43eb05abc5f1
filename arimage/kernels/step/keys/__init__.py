"""Where many rows of a step leave their keys and values."""

import torch

from ... import runs_triton
from . import reference


def write_keys(
    states: torch.Tensor,
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.LongTensor,
) -> None:
    """Rotate neighbouring pairs of keys, and write keys and values to the cache of a layer.

    Args:
        states: [R, 2 key_heads, head_dim], the keys first, those of a row without gaps.
        table, positions, keys, values, index: see `arimage.kernels.step.qkv`.
    """
    if runs_triton(states):
        from .triton import write_keys

        return write_keys(states, table, positions, keys, values, index)
    return reference.write_keys(states, table, positions, keys, values, index)
