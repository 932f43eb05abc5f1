"""The norm before a layer whose input is modulated by a condition, where the layer itself does not take it along."""

import torch

from ... import runs_triton
from . import reference


def modulated_norm(
    x: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    added: float = 0.0,
) -> torch.Tensor:
    """f(`x`) of `arimage.kernels.step.modulated` for any number of rows, in `dtype`."""
    arguments = x, eps, dtype, norm_weight, norm_bias, scale, shift, added
    if runs_triton(x):
        from .triton import modulated_norm

        return modulated_norm(*arguments)
    return reference.modulated_norm(*arguments)
