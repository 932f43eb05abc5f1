"""The norm before a layer whose input is modulated by a condition, where the layer itself does not take it along."""

import torch
import torch.nn.functional as F

from ...operation import operation


@operation()
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
    if norm_weight is not None and norm_bias is not None:
        norm_weight, norm_bias = norm_weight.to(x.dtype), norm_bias.to(x.dtype)
    x = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    if scale is not None and shift is not None:
        rows = x.unflatten(0, (len(scale), -1))
        x = torch.addcmul(shift[:, None], rows, scale[:, None] + added).flatten(0, 1)
    return x.to(dtype)
