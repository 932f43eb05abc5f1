"""Weights that are divided among processes."""

import sys

import torch


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is divided among processes. There is none before torch's module for them is imported, which
    takes longer than all of this library."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
