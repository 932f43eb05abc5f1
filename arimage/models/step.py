"""Layers by the kernels of `arimage.kernels.step`, and which forward passes take them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.step import DTYPES, ENABLED, MOST_ROWS, WIDTH, has_kernels, has_many_rows
from ..kernels.step.attention import attention
from ..kernels.step.linear import linear
from .layers import FeedForward, Linear
from .mixin import ModelMixin
from .quantized import QuantizedLinear


@dataclass(frozen=True)
class StepPlaces:
    """Where the M fed tokens of a step are, and what they see, for all layers. Groups repeat them.

    Attributes:
        table, positions, index: see `arimage.kernels.step.qkv`.
        seen, prefix, first, slots, visible: see `arimage.kernels.step.attention`.
    """

    table: torch.FloatTensor
    positions: torch.LongTensor
    index: torch.LongTensor
    seen: torch.BoolTensor
    prefix: int
    first: int
    slots: torch.LongTensor
    visible: torch.BoolTensor | None = None


def attend_and_feed(
    hidden: torch.Tensor,
    query: torch.Tensor,
    at: StepPlaces,
    keys: torch.Tensor,
    values: torch.Tensor,
    out_proj: Linear,
    norm: Any,
    feed_forward: FeedForward,
) -> torch.Tensor:
    """What follows the queries of a layer [R, heads, head_dim]: attention, and the feed-forward layer after its norm,
    in four launches. Returns the next hidden states [R, hidden_size], in place of `hidden` if there are many rows."""
    turns = (at.table, at.positions) if has_many_rows(hidden) else ()
    attended = attention(query, keys, values, at.seen, at.prefix, at.first, at.slots, at.visible, *turns)
    hidden = linear(attended, out_proj.weight, residual=hidden, scale=out_proj.scale)
    gate, up, down = feed_forward.gate_proj, feed_forward.up_proj, feed_forward.down_proj
    both = {"up": up.weight, "scale": gate.scale, "up_scale": up.scale}
    inner = linear(hidden, gate.weight, gain=norm.weight, eps=norm.eps, **both)
    return linear(inner, down.weight, residual=hidden, scale=down.scale)


HEAD_DIMS = (32, 64, 128)
PACKAGE = __name__.partition(".")[0] + "."


def runs_step(network: Any) -> bool:
    """Whether forward passes of any number of rows take the kernels of a step of a Llama decoder, see `runs_kernels`:
    `network` also has `head_dim`."""
    return runs_kernels(network, quantized=True) and network.head_dim in HEAD_DIMS


def runs_kernels(network: Any, rows: int = 1, *, float32: bool = False, quantized: bool = False) -> bool:
    """Whether a forward pass of `rows` rows takes the kernels of a step: few rows, half precision, an NVIDIA GPU of
    compute capability 8.0 or newer, no gradients, and layers as they were built. Adapters that are not merged, hooks
    (offloading), weights that are distributed or quantised by others, and networks that were compiled alone take the
    layers in torch.

    Args:
        network: has in `step_parts` the modules that a step goes through.
        float32: whether its kernels multiply float32 as precisely as torch, and take it too.
        quantized: whether they take a `QuantizedLinear` too.
    """
    if not ENABLED or rows > MOST_ROWS or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    # What `torch.compile` returns is none.
    if not isinstance(network, ModelMixin) or network.training or network._compiled_call_impl is not None:
        return False
    modules = [each for part in network.step_parts for each in part.modules()]
    weight = next(weight for each in modules for weight in each.parameters())
    if weight.dtype not in DTYPES and not (float32 and weight.dtype == torch.float32):
        return False
    if not has_kernels(weight):
        return False
    return not is_hooked(network) and all(is_plain(each, weight, quantized) for each in modules)


def is_hooked(module: nn.Module) -> bool:
    # Offloading replaces the method of a module.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_plain(module: nn.Module, like: torch.Tensor, quantized: bool) -> bool:
    """Whether a module is of this package or of torch, without hooks, and its weights are what the kernels read: on
    the device and in the dtype of `like`, or `quantized`."""
    if isinstance(module, QuantizedLinear):
        fits = module.bias is None and module.in_features % WIDTH == 0 and has_kernels(module.weight)
        return quantized and fits and not is_hooked(module)
    if not type(module).__module__.startswith((PACKAGE, "torch.nn.modules.")) or is_hooked(module):
        return False
    return all(
        weight.device == like.device
        and weight.dtype == like.dtype
        and (weight.ndim != 2 or weight.shape[-1] % WIDTH == 0)
        and not is_traceable_wrapper_subclass(weight)
        for weight in module._parameters.values()
        if weight is not None
    )
