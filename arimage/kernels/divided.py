"""Weights that are divided among processes."""

import sys

import torch


def is_divided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is divided among processes. It can be only after torch's module for that was imported, which
    takes longer than importing all of this library."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
