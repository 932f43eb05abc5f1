"""The reference of the linear layer in torch."""

import torch
import torch.nn.functional as F


def product(states: torch.Tensor, weight: torch.Tensor, scale: torch.FloatTensor | None) -> torch.Tensor:
    """The product with a weight, of 8 bits if it has a `scale`."""
    if scale is None:
        return F.linear(states, weight)
    return (F.linear(states.float(), weight.float()) * scale).to(states.dtype)


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
    result = product(states, weight, scale)
    if up is not None:
        result = F.silu(result) * product(states, up, up_scale)
    return result if residual is None else result + residual
