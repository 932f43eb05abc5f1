"""The gate of a feed-forward layer for many rows of a step."""

import torch

from ... import runs_triton
from . import reference


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """silu(`gates`) `ups`, [R, N] each, whose rows have no gaps."""
    if runs_triton(gates):
        from .triton import gate

        return gate(gates, ups)
    return reference.gate(gates, ups)
