"""The reference of the gate in torch."""

import torch
import torch.nn.functional as F


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    return F.silu(gates) * ups
