"""Where many rows of a step leave their keys and values."""

import torch

from ...operation import operation
from ...rotary import rotate


@operation(writes=("keys", "values"))
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
    branches = len(states) // len(positions)
    key, value = states.chunk(2, dim=1)
    row = torch.arange(len(keys), device=keys.device).repeat_interleave(len(states) // len(keys))
    at = index.repeat(branches)
    keys[row, :, at] = rotate(key[None], table[positions].repeat(branches, 1, 1)[None])[0]
    values[row, :, at] = value
