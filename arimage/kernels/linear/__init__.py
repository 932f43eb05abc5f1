"""Linear layers, which use oneDNN on CPUs where it is faster than PyTorch's default."""

from functools import cache

import torch
import torch.nn.functional as F


# With fewer multiplications the call itself takes longer.
_LEAST = 1 << 20


@cache
def _prefers_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL, PyTorch's default. It does on AMD CPUs with AVX-512,
    where MKL runs at less than half of its speed. Other CPUs were not measured."""
    if not hasattr(torch.cpu, "get_capabilities"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_f")) and "AMD" in capabilities.get("cpu_name", "")


def _takes_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return (
        not torch.compiler.is_compiling()
        # Not fake and not quantised.
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * len(weight) >= _LEAST
        and not (trained and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
        and _prefers_onednn()
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of `x` [..., D] with `weight` [N, D] and `bias` [N]: [..., N]."""
    if _takes_onednn(x, weight, bias):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
