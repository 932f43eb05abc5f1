"""A linear layer of a step, with what comes before and after it."""

import torch
import torch.nn.functional as F

from ...linear.int8 import PackedWeight, int8_product, stored_product, takes_stored
from ...operation import operation
from .. import has_few_rows, has_many_rows
from ..gate import gate


# The least power of two by which every weight of 8 bits can be multiplied without rounding in float16.
LEAST_EXPONENT = -15


def scaled_product(x: torch.Tensor, weight: torch.Tensor, scale: torch.FloatTensor) -> torch.Tensor:
    """x (scale W)^T for a weight of 8 bits, with the scale of each row in float32."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    wide = weight.to(x.dtype)
    if dtype == torch.float16:
        # Weights of up to 448 would overflow where those that they stand for do not. Powers of two do not round.
        power = torch.ldexp(torch.ones_like(scale), (scale.frexp().exponent - 1).clamp(min=LEAST_EXPONENT))
        wide, scale = wide * power.to(x.dtype)[:, None], scale / power
    return (F.linear(x, wide) * scale).to(x.dtype)


def product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.FloatTensor | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The product with a weight, of 8 bits if it has a `scale`, and a `bias`."""
    if scale is None:
        return F.linear(x, weight, bias)
    if isinstance(weight, PackedWeight):
        scaled = int8_product(x, weight, scale)
    else:
        scaled = (stored_product if takes_stored(x, weight) else scaled_product)(x, weight, scale)
    return scaled if bias is None else scaled + bias


def lie_together(weight: torch.Tensor, up: torch.Tensor) -> bool:
    # Compilers do not know where tensors lie.
    if torch.compiler.is_compiling() or weight.untyped_storage()._cdata != up.untyped_storage()._cdata:
        return False
    return up.storage_offset() == weight.storage_offset() + weight.numel()


def gated(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor,
    scale: torch.FloatTensor | None,
    up_scale: torch.FloatTensor | None,
) -> torch.Tensor:
    """silu(x W^T) (x U^T), by one product where the weights lie one after another, as `fuse_projections` leaves
    them."""
    if scale is None and lie_together(weight, up):
        both = weight.as_strided((len(weight) + len(up), x.shape[-1]), weight.stride())
        return gate(*F.linear(x, both).tensor_split([len(weight)], dim=-1))
    return gate(product(x, weight, scale), product(x, up, up_scale))


def normalised(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if gain is None else F.rms_norm(x, x.shape[-1:], gain, eps)


@operation(when=has_few_rows)
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    up: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.FloatTensor | None = None,
    up_scale: torch.FloatTensor | None = None,
    bias: torch.Tensor | None = None,
    gelu: bool = False,
    index: torch.LongTensor | None = None,
) -> torch.Tensor:
    """The product [R, N] of `x` [R, D] and `weight` [N, D].

    Args:
        x: D is a multiple of 64.
        gain: [D], that of an RMSNorm of `x` with `eps` before the product; None for no norm.
        up: [N, D]; the result is silu(x `weight`^T) (x `up`^T).
        residual: [R, N], what is added to the product. Of more than `MOST_ROWS` rows the result takes its memory.
        scale, up_scale: float32 [N], what the rows of weights of 8 bits are multiplied by. These are int8, or float8
            where the card has it.
        bias: [N], of a product without `up`.
        gelu: whether it ends with this activation, of a product alone.
        index: int64 [R], the rows of `x` that are taken, in place of all.
    """
    x = x if index is None else x[index]
    states = normalised(x, gain, eps)
    if residual is not None and up is None and scale is None and bias is None and has_many_rows(x):
        # The sum is part of the product.
        return residual.addmm_(states, weight.t())
    result = product(states, weight, scale, bias) if up is None else gated(states, weight, up, scale, up_scale)
    if residual is None:
        return F.gelu(result) if gelu else result
    return residual.add_(result) if has_many_rows(x) else residual + result
