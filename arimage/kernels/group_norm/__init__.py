"""Group norm and SiLU in one operation."""

import torch

from .. import runs_triton
from . import reference


def group_norm_silu(
    hidden: torch.Tensor, num_groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """SiLU of the group norm (https://arxiv.org/abs/1803.08494) of images [B, C, H, W], in their dtype.

    On a GPU without gradients, Triton computes both in float32, reads the images twice and writes them once, in their
    memory format. Elsewhere the result is contiguous.

    Args:
        hidden: float32, bfloat16 or float16, contiguous or channels_last.
        num_groups: a divisor of C.
        weight: [C], multiplied with the normalised channels.
        bias: [C], added afterwards.
        eps: added to the variance.
    """
    if runs_triton(hidden) and not torch.is_grad_enabled():
        from . import triton

        return triton.group_norm_silu(hidden, num_groups, weight, bias, eps)
    return reference.group_norm_silu(hidden, num_groups, weight, bias, eps)
