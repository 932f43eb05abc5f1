"""The reference of the rotation in torch."""

import torch


def rotate(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    pairs, table = states.float().unflatten(-1, (-1, 2)), table.unsqueeze(2)
    if torch.compiler.is_compiling():
        # Inductor fuses operations on real numbers, but not on complex ones.
        (even, odd), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
        rotated = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))
    return rotated.flatten(-2).to(states.dtype)
