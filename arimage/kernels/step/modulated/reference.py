"""The reference of the modulated linear layer in torch."""

import torch
import torch.nn.functional as F

from ..modulated_norm.reference import modulated_norm


def modulated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float | None,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    added: float,
    residual: torch.Tensor | None,
    gate: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    if eps is not None:
        x = modulated_norm(x, eps, weight.dtype, norm_weight, norm_bias, scale, shift, added)
    return product(x, weight, bias, residual, gate, activation)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    gate: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """The product with `x`, and what comes after it. Sums of two dtypes are one operator, which needs no casts."""
    result = F.linear(x.to(weight.dtype), weight, bias)
    if residual is not None:
        before = residual[:, None].expand(-1, len(x) // len(residual), -1).flatten(0, 1)
        if gate is None:
            result = before + result
        else:
            before, result = (states.unflatten(0, (len(gate), -1)) for states in (before, result))
            result = torch.addcmul(before, result, gate[:, None]).flatten(0, 1)
    if activation == "silu":
        return F.silu(result)
    return F.gelu(result, approximate="tanh") if activation == "gelu" else result
