"""Linear layers, by the products that are faster on CPUs than PyTorch's default."""

import torch
import torch.nn.functional as F


# On an Intel processor with AVX-512, oneDNN takes 0.5 to 0.9 of the time of MKL from here on, and more below: at two
# rows, or for weights of [768, 256], twice as much. The rule is one for all machines, since the two round differently.
_LEAST_ROWS = 8
_LEAST_WEIGHTS = 1 << 20


# With AMX, a weight in bfloat16 that is the first factor goes through the tiles as it is stored, while `F.linear`
# reorders it first: up to this many rows that takes 0.6 to 0.9 of the time, without AMX up to twice as long.
# `benchmarks/int8_rows.py` measures it.
_HAS_TILES = torch.cpu._is_amx_tile_supported()
_MOST_ROWS = 64


def _multiplies_plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `x` and `weight` are plain tensors of a `dtype` on a CPU, which no gradients, compilers or autocast
    need."""
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return (
        not torch.compiler.is_compiling()
        # Not fake and not quantised.
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == dtype
        and not (trained and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of `x` [..., D] with `weight` [N, D] and `bias` [N]: [..., N]."""
    rows = x.numel() // x.shape[-1]
    if _HAS_TILES and 0 < rows <= _MOST_ROWS and _multiplies_plain(x, weight, bias, torch.bfloat16):
        return _streamed(x.reshape(rows, -1), weight, bias).view(*x.shape[:-1], -1)
    large = weight.numel() >= _LEAST_WEIGHTS and rows >= _LEAST_ROWS
    if large and _multiplies_plain(x, weight, bias, torch.float32):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def _streamed(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The product [R, N] of `rows` [R, D] with the `weight` as the first factor, and the `bias` [N]."""
    if len(rows) == 1:
        return (torch.mv(weight, rows[0]) if bias is None else torch.addmv(bias, weight, rows[0]))[None]
    product = weight @ rows.t() if bias is None else torch.addmm(bias[:, None], weight, rows.t())
    return product.t().contiguous()
