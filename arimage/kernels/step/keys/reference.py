"""The reference of the keys and values in torch."""

import torch

from ...rotary.reference import rotate


def write_keys(
    states: torch.Tensor,
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    index: torch.LongTensor,
) -> None:
    branches = len(states) // len(positions)
    key, value = states.chunk(2, dim=1)
    row = torch.arange(len(keys), device=keys.device).repeat_interleave(len(states) // len(keys))
    at = index.repeat(branches)
    keys[row, :, at] = rotate(key[None], table[positions].repeat(branches, 1, 1)[None])[0]
    values[row, :, at] = value
