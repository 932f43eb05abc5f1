"""The products of a step for more than `MOST_ROWS` rows, which are those of torch."""

import torch
import torch.nn.functional as F

from .gate import gate
from .keys import write_keys


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


def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.FloatTensor | None) -> torch.Tensor:
    """The product with a weight, of 8 bits if it has a `scale`."""
    if scale is None:
        return F.linear(x, weight)
    return scaled_product(x, weight, scale)


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
        both = weight.as_strided((len(weight) + len(up), x.shape[1]), weight.stride())
        return gate(*F.linear(x, both).tensor_split([len(weight)], dim=1))
    return gate(product(x, weight, scale), product(x, up, up_scale))


def normalised(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if gain is None else F.rms_norm(x, x.shape[-1:], gain, eps)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    up: torch.Tensor | None,
    residual: torch.Tensor | None,
    scale: torch.FloatTensor | None,
    up_scale: torch.FloatTensor | None,
) -> torch.Tensor:
    """See `arimage.kernels.step.linear`."""
    states = normalised(x, gain, eps)
    if residual is not None and up is None and scale is None:
        # The sum is part of the product.
        return residual.addmm_(states, weight.t())
    result = product(states, weight, scale) if up is None else gated(states, weight, up, scale, up_scale)
    return result if residual is None else residual.add_(result)


def qkv(
    x: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    table: torch.FloatTensor,
    positions: torch.LongTensor,
    head_dim: int,
    keys: torch.Tensor | None,
    values: torch.Tensor | None,
    index: torch.LongTensor | None,
    scale: torch.FloatTensor | None,
) -> torch.Tensor:
    """See `arimage.kernels.step.qkv`."""
    states = product(normalised(x, gain, eps), weight, scale).unflatten(-1, (-1, head_dim))
    if keys is None or values is None or index is None:
        return states
    query, rest = states.tensor_split([states.shape[1] - 2 * keys.shape[1]], dim=1)
    write_keys(rest, table, positions, keys, values, index)
    return query
