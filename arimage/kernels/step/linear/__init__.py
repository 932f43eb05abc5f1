"""A linear layer of a step, with what comes before and after it."""

import torch

from ... import runs_triton
from .. import has_many_rows, many
from . import reference


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    up: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.FloatTensor | None = None,
    up_scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """The product [R, N] of `x` [R, D] and `weight` [N, D].

    Args:
        x: D is a multiple of 64.
        gain: [D], that of an RMSNorm of `x` with `eps` before the product; None for no norm.
        up: [N, D]; the result is silu(x `weight`^T) (x `up`^T).
        residual: [R, N], what is added to the product. Of more than `MOST_ROWS` rows the result takes its memory.
        scale, up_scale: float32 [N], what the rows of weights of 8 bits are multiplied by. These are int8, or float8
            where the card has it.
    """
    if has_many_rows(x):
        return many.linear(x, weight, gain, eps, up, residual, scale, up_scale)
    if runs_triton(x):
        from .triton import linear

        return linear(x, weight, gain, eps, up, residual, scale, up_scale)
    return reference.linear(x, weight, gain, eps, up, residual, scale, up_scale)
