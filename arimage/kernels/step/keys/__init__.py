"""Where many rows of a step leave their keys and values."""

import torch

from ...operation import operation
from ..turns import turned


@operation(writes=("keys", "values"))
def write_keys(
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.LongTensor,
    halves: bool = False,
) -> None:
    """Rotate keys, and write keys and values to the cache of a layer.

    Args:
        key, value: [R, key_heads, head_dim], those of a row without gaps.
        table, positions, keys, values, index, halves: see `arimage.kernels.step.qkv`.
    """
    row = torch.arange(len(keys), device=keys.device).repeat_interleave(len(key) // len(keys))
    at = index.repeat(len(key) // len(index))
    keys[row, :, at] = turned(key, table, positions, halves)
    values[row, :, at] = value
