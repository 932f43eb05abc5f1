"""Linear layers, which use oneDNN on CPUs where it is faster than PyTorch's default."""

import torch
import torch.nn.functional as F


# On an Intel processor with AVX-512, oneDNN takes 0.5 to 0.9 of the time of MKL from here on, and more below: at two
# rows, or for weights of [768, 256], twice as much. The rule is one for all machines, since the two round differently.
_LEAST_ROWS = 8
_LEAST_WEIGHTS = 1 << 20


def _takes_onednn(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    trained = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    return (
        not torch.compiler.is_compiling()
        # Not fake and not quantised.
        and type(x) is torch.Tensor
        and type(weight) in (torch.Tensor, torch.nn.Parameter)
        and x.device.type == weight.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not (trained and torch.is_grad_enabled())
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and torch.backends.mkldnn.enabled
    )


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`F.linear` of `x` [..., D] with `weight` [N, D] and `bias` [N]: [..., N]."""
    large = weight.numel() >= _LEAST_WEIGHTS and x.numel() >= _LEAST_ROWS * x.shape[-1]
    if large and _takes_onednn(x, weight, bias):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)
