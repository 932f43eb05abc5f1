"""Layers by the kernels of `arimage.kernels.step`, and which forward passes take them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..kernels.step import DTYPES, ENABLED, MOST_ROWS, WIDTH, has_kernels
from ..kernels.step.embedding import embedding
from ..kernels.step.linear import linear
from .layers import Linear
from .mixin import ModelMixin
from .quantized import DTYPES as EIGHT_BITS
from .quantized import QuantizedLinear


@dataclass(frozen=True)
class StepPlaces:
    """Where the M fed tokens of a step are, and what they see, for all layers. Branches repeat them.

    Attributes:
        table, positions, index: see `arimage.kernels.step.qkv`.
        halves: see there too.
        seen, prefix_end, first, slots, visible, ends, columns: see `arimage.kernels.step.attention`.
    """

    table: torch.FloatTensor
    positions: torch.LongTensor
    index: torch.LongTensor
    seen: torch.BoolTensor
    prefix_end: int
    first: int
    slots: torch.LongTensor
    visible: torch.BoolTensor | None = None
    ends: torch.LongTensor | None = None
    columns: int = 1
    halves: bool = False

    @classmethod
    def of(
        cls,
        cache,
        table: torch.FloatTensor,
        seen: torch.BoolTensor,
        positions: torch.LongTensor,
        slots: torch.LongTensor,
        index: torch.LongTensor | None = None,
        visible: torch.BoolTensor | None = None,
    ) -> Self:
        """The places of fed tokens [B, M]: `positions` in the table, `slots` up to which they see, and the `index` in
        the cache that they are written to, by default that of the slots. `visible` is [B, M, K]."""
        slots = slots.flatten()
        return cls(
            table=table,
            positions=positions.flatten(),
            index=cache.index_of[slots] if index is None else index,
            seen=seen,
            prefix_end=cache.prefix_end,
            first=cache.first,
            slots=slots,
            visible=None if visible is None else visible.flatten(0, 1),
        )


def embed(
    layer: nn.Embedding,
    tokens: torch.LongTensor,
    positions: torch.LongTensor,
    cache,
    table: torch.FloatTensor,
    seen: torch.BoolTensor,
    slots: torch.LongTensor | None = None,
    visible: torch.BoolTensor | None = None,
    places: torch.LongTensor | None = None,
) -> tuple[torch.Tensor, StepPlaces]:
    """The embeddings [R, hidden_size] of `tokens` [B, M] of all branches, and where they are; see
    `TokenModel.forward`. `places` are the rows of the table, by default the `positions`."""
    hidden, last, index = embedding(tokens, positions, slots, cache.index_of, layer.weight, cache.branches)
    return hidden, StepPlaces.of(cache, table, seen, positions if places is None else places, last, index, visible)


def product(layer: Linear, hidden: torch.Tensor, norm: Any = None) -> torch.Tensor:
    """What a layer makes of the rows `hidden` [R, D], perhaps after a norm, in one launch."""
    before = {} if norm is None else {"gain": norm.weight, "eps": norm.eps}
    return linear(hidden, layer.weight, scale=layer.scale, **before)


HEAD_DIMS = (32, 64, 128)
PACKAGE = __name__.partition(".")[0] + "."


def runs_step(network: Any) -> bool:
    """Whether forward passes of any number of rows take the kernels of a step of a Llama decoder, see `runs_kernels`:
    `network` also has `head_dim`."""
    return runs_kernels(network) and network.head_dim in HEAD_DIMS


def begins_step(
    cache,
    *networks: Any,
    slots: torch.LongTensor | None = None,
    visible: torch.BoolTensor | None = None,
    runs: Callable[[Any], bool] = runs_step,
) -> bool:
    """Whether the next forward pass is a step, which `runs` decides for each of `networks`. The cache then has all its
    slots."""
    # Slots of a tree say nothing about what they see.
    steps = (slots is None or visible is not None) and all(map(runs, networks))
    cache.leave_ends(steps)
    if steps:
        cache.allocate()
    return steps


def runs_kernels(network: Any, rows: int = 1, *, float32: bool = False) -> bool:
    """Whether a forward pass of `rows` rows takes the kernels of a step: few rows, half precision, an NVIDIA GPU of
    compute capability 8.0 or newer, no gradients, and layers as they were built. Adapters that are not merged, hooks
    (offloading), weights that are distributed or quantised by others, and networks that were compiled alone take the
    layers in torch.

    Args:
        network: has in `step_parts` the modules that a step goes through.
        float32: whether its kernels multiply float32 as precisely as torch, and take it too.
    """
    if not ENABLED or rows > MOST_ROWS or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    # What `torch.compile` returns is none.
    if not isinstance(network, ModelMixin) or network.training or network._compiled_call_impl is not None:
        return False
    parts = network.step_parts
    weight = next(each for each in parts[0].parameters() if each.dtype not in EIGHT_BITS)
    if weight.dtype not in DTYPES and not (float32 and weight.dtype == torch.float32):
        return False
    if not has_kernels(weight) or is_hooked(network):
        return False
    return all(is_plain(each, weight) for part in parts for each in part.modules())


def is_hooked(module: nn.Module) -> bool:
    # Offloading replaces the method of a module.
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def is_plain(module: nn.Module, like: torch.Tensor) -> bool:
    """Whether a module is of this package or of torch, without hooks, and its weights are what the kernels read."""
    known = type(module).__module__.startswith((PACKAGE, "torch.nn.modules."))
    return known and not is_hooked(module) and reads_weights(module, like)


def reads_weights(module: nn.Module, like: torch.Tensor) -> bool:
    """Whether the weights of a module are what the kernels read: on the device and in the dtype of `like`, or of 8
    bits."""
    if isinstance(module, QuantizedLinear):
        return module.in_features % WIDTH == 0 and has_kernels(module.weight)
    own = [weight for weight in module._parameters.values() if weight is not None]
    return has_weights_like(module, like) and all(each.ndim != 2 or each.shape[-1] % WIDTH == 0 for each in own)


def has_weights_like(module: nn.Module, like: torch.Tensor) -> bool:
    """Whether the weights of a module are plain tensors on the device and in the dtype of `like`, or of 8 bits."""
    if isinstance(module, QuantizedLinear):
        return module.weight.device == like.device
    return all(
        weight.device == like.device and weight.dtype == like.dtype and not is_traceable_wrapper_subclass(weight)
        for weight in module._parameters.values()
        if weight is not None
    )
