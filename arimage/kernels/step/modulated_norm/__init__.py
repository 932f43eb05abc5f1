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


def added(residual: torch.Tensor, product: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """`residual` [M, N] and the `gate` [M, N] times the `product` [R, N], see `arimage.kernels.step.modulated`."""
    # Sums of two dtypes are one operator, which needs no casts.
    before = residual[:, None].expand(-1, len(product) // len(residual), -1).flatten(0, 1)
    if gate is None:
        return before + product
    before, product = (states.unflatten(0, (len(gate), -1)) for states in (before, product))
    return torch.addcmul(before, product, gate[:, None]).flatten(0, 1)


@operation(whole=("product", "residual"))
def sum_and_norm(
    product: torch.Tensor,
    residual: torch.Tensor,
    gate: torch.Tensor | None,
    eps: float,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the `residual` [R, D] and the `gate` [M, D] times the `product` [R, D], and f of this sum in the
    dtype of the product; see `arimage.kernels.step.modulated`."""
    states = added(residual, product, gate)
    return states, modulated_norm(states, eps, product.dtype, norm_weight, norm_bias, scale, shift)
