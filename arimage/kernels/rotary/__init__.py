"""Rotary position embedding (https://arxiv.org/abs/2104.09864) of neighbouring pairs."""

import torch

from .. import runs_triton
from . import reference


def rotate(states: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate neighbouring pairs of `states` [B, T, heads, D] by the cosines and sines in `table` [B or 1, T, D / 2,
    2], in float32. The result is contiguous and has the dtype of `states`."""
    # Inductor fuses the reference with the writes to the cache.
    if runs_triton(states) and not (states.requires_grad or torch.compiler.is_compiling()):
        from .triton import rotate

        return rotate(states, table)
    return reference.rotate(states, table)
