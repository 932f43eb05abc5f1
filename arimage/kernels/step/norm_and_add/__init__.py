"""The sum of a layer with a norm after it and its input, in a step."""

import torch
import torch.nn.functional as F

from ...operation import operation


@operation()
def norm_and_add(x: torch.Tensor, gain: torch.Tensor, eps: float, residual: torch.Tensor) -> torch.Tensor:
    """`residual` [R, D] and the RMSNorm of `x` [R, D] with `gain` [D], added."""
    return residual + F.rms_norm(x, x.shape[-1:], gain, eps)
