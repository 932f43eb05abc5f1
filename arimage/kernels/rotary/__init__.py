"""Rotary position embedding (https://arxiv.org/abs/2104.09864) of neighbouring pairs."""

import torch

from ..operation import operation


def _alone(states: torch.Tensor, table: torch.Tensor) -> bool:
    # Inductor fuses the definition with the writes to the cache.
    return not (states.requires_grad or torch.compiler.is_compiling())


@operation(whole=("table",), when=_alone)
def rotate(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of `states` [B, T, heads, D] by the cosines and sines in `table` [B or 1, T, D / 2,
    2], in float32. The result is contiguous and has the dtype of `states`."""
    wide = states.float()
    pairs, table = wide.unflatten(-1, (-1, 2)), table.unsqueeze(2)
    if torch.compiler.is_compiling():
        # Inductor fuses operations on real numbers, but not on complex ones.
        (even, odd), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    elif wide is states or states.requires_grad:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs).mul_(torch.view_as_complex(table)))
    return rotated.flatten(-2).to(states.dtype)
