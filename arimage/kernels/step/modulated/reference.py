"""The reference of the modulated linear layer in torch."""

import torch
import torch.nn.functional as F


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
    def per_row(condition: torch.Tensor) -> torch.Tensor:
        return condition.repeat_interleave(len(x) // len(condition), dim=0)

    if eps is not None:
        if norm_weight is not None and norm_bias is not None:
            norm_weight, norm_bias = norm_weight.to(x.dtype), norm_bias.to(x.dtype)
        x = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias, eps)
    if scale is not None and shift is not None:
        x = torch.addcmul(per_row(shift), x, per_row(scale) + added)
    result = F.linear(x.to(weight.dtype), weight, bias)
    if residual is not None:
        residual, result = per_row(residual), result.to(residual.dtype)
        result = residual + result if gate is None else torch.addcmul(residual, result, per_row(gate))
    if activation == "silu":
        return F.silu(result)
    return F.gelu(result, approximate="tanh") if activation == "gelu" else result
