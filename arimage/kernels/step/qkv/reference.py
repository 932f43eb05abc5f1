"""The reference of queries, keys and values in torch."""

import torch
import torch.nn.functional as F

from ...rotary.reference import rotate
from ..linear.reference import product


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
    branches = len(x) // len(positions)
    states = product(F.rms_norm(x, x.shape[-1:], gain, eps), weight, scale).unflatten(-1, (-1, head_dim))
    key_heads = 0 if keys is None else keys.shape[1]
    rotated, value = states.split([states.shape[1] - key_heads, key_heads], dim=1)
    rotated = rotate(rotated[None], table[positions].repeat(branches, 1, 1)[None])[0]
    query, key = rotated.split([rotated.shape[1] - key_heads, key_heads], dim=1)
    if keys is not None and values is not None and index is not None:
        row = torch.arange(len(keys), device=x.device).repeat_interleave(len(x) // len(keys))
        at = index.repeat(branches)
        keys[row, :, at] = key
        values[row, :, at] = value
    return query.contiguous()
