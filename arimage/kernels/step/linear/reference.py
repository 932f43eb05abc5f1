"""The reference of the linear layer in torch."""

import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    up: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.FloatTensor | None = None,
    up_scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    states = x if gain is None else F.rms_norm(x, x.shape[-1:], gain, eps)

    def product(weight: torch.Tensor, scale: torch.FloatTensor | None) -> torch.Tensor:
        if scale is not None:
            return (F.linear(states.float(), weight.float()) * scale).to(x.dtype)
        return F.linear(states, weight)

    result = product(weight, scale)
    if up is not None:
        result = F.silu(result) * product(up, up_scale)
    return result if residual is None else result + residual
