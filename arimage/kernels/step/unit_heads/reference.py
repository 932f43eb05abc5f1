"""The reference of queries and keys of one length in torch."""

import math

import torch
import torch.nn.functional as F

from ...rotary.reference import rotate


def unit_heads(
    states: torch.Tensor,
    log_scale: torch.Tensor,
    length: float,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    table: torch.FloatTensor | None,
) -> torch.Tensor:
    both = F.normalize(states[:, :, :2].float(), dim=-1) * length
    if table is not None:
        both = rotate(both.flatten(2, 3), table).unflatten(2, (2, -1))
    query, key = both.unbind(2)
    query = query * log_scale.float().clamp(max=math.log(100.0)).exp()[:, None]
    rows, last = len(states), first + states.shape[1]
    keys[:rows, :, first:last] = key.transpose(1, 2).to(keys.dtype)
    values[:rows, :, first:last] = states[:, :, 2].transpose(1, 2)
    return query.to(states.dtype)
