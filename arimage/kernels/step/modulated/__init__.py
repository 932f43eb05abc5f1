"""A linear layer of a step whose input and output are modulated by a condition."""

from typing import Literal

import torch
import torch.nn.functional as F

from ...operation import operation
from .. import has_few_rows
from ..linear import product
from ..modulated_norm import added as added_to
from ..modulated_norm import modulated_norm


def product_dtype(weight, bias, precise: bool, row_scale) -> torch.dtype:
    return torch.float32 if precise else (weight if row_scale is None else bias).dtype


@operation(when=has_few_rows)
def modulated(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    added: float = 0.0,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    activation: Literal["", "silu", "gelu", "gelu_tanh"] = "",
    precise: bool = False,
    row_scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    """The product [R, N] of f(`x`) [R, D] and `weight` [N, D]: activation(residual + gate (f(x) W^T + b)). It has the
    dtype of `residual` or else that of the product: of `weight`, or of a weight of 8 bits that of `bias`.

    More than `MOST_ROWS` rows take the norm and the product of torch one after the other.

    `scale`, `shift`, `gate` and `residual` have M rows, where M divides R: each is that of R / M consecutive rows.
    Float32 is multiplied in full precision.

    Args:
        x: D is a multiple of 64.
        bias: [N].
        eps: of a LayerNorm of `x` before the product; None for no norm, and then nothing but `x` itself.
        norm_weight, norm_bias: [D], both or none, those of the norm.
        scale, shift: [M, D], both or none, by which the normed rows are multiplied and what is added then.
        added: is added to `scale`.
        residual: [M, N], what the product is added to.
        gate: [M, N], with `residual` only, by which the product is multiplied.
        activation: of the result; "gelu_tanh" is the approximation by tanh.
        precise: whether the product is one of float32, whatever the dtype of `weight`, and has no `residual`.
        row_scale: float32 [N], what the rows of a weight of 8 bits are multiplied by, as `scale` of
            `arimage.kernels.step.linear`.
    """
    dtype = product_dtype(weight, bias, precise, row_scale)
    if eps is not None:
        x = modulated_norm(x, eps, dtype, norm_weight, norm_bias, scale, shift, added)
    weight = weight.to(dtype) if row_scale is None else weight
    result = product(x.to(dtype), weight, row_scale, None if bias is None else bias.to(dtype))
    if residual is not None:
        result = added_to(residual, result, gate)
    if activation == "silu":
        return F.silu(result)
    if activation == "gelu":
        return F.gelu(result)
    return F.gelu(result, approximate="tanh") if activation == "gelu_tanh" else result
