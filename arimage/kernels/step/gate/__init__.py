"""The gate of a feed-forward layer for many rows of a step."""

import torch
import torch.nn.functional as F

from ...operation import operation


@operation()
def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """silu(`gates`) `ups`, [R, N] each, whose rows have no gaps."""
    return F.silu(gates).mul_(ups)
