"""Projections of one input as one product: queries, keys and values, or gate and up."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.divided import is_divided
from ..kernels.linear import linear
from .layers import Linear


# By their names in this package and in transformers, in the order in which layers call them.
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Fused:
    """The weights of linear layers of one input, one after another in one tensor, of which the weights of the layers
    are parts.

    The first layer multiplies its input by all of them, and the others return what it left for them. Layers whose
    weights are replaced are on their own again.

    Args:
        layers: in the order in which they are called. Until `take_apart` their class is `FusedLinear`.

    Attributes:
        weight: [the outputs of all layers, inputs].
        bias: [the outputs of all layers], or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, layers: Sequence[nn.Linear]):
        self._layers, self._class = list(layers), type(layers[0])
        self._product: Callable = linear if self._class is Linear else F.linear
        self._sizes = [layer.out_features for layer in layers]
        # An input and the outputs for it.
        self._latest: tuple[torch.Tensor, Sequence[torch.Tensor]] | None = None
        self.join()
        for place, layer in enumerate(layers):
            layer.__class__ = FusedLinear
            layer.fused, layer.place = self, place

    def join(self) -> None:
        """Copy the weights of the layers into one tensor, and make them parts of it."""
        self.weight, self.bias = (self._joined(each) for each in self._parameters())

    def _parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        biases = [layer.bias for layer in self._layers if layer.bias is not None]
        return [layer.weight for layer in self._layers], biases

    def _joined(self, parameters: Sequence[nn.Parameter]) -> torch.Tensor | None:
        if not parameters:
            return None
        whole = torch.cat([each.data for each in parameters])
        for parameter, part in zip(parameters, whole.split(self._sizes), strict=True):
            parameter.data = part
        return whole

    @property
    def holds(self) -> bool:
        """Whether the weights of the layers are still parts of the one tensor."""
        for whole, parameters in zip((self.weight, self.bias), self._parameters(), strict=True):
            offset = 0
            for parameter in parameters:
                if whole is None or parameter.untyped_storage()._cdata != whole.untyped_storage()._cdata:
                    return False
                if parameter.storage_offset() != offset or parameter.dtype != whole.dtype:
                    return False
                offset += parameter.numel()
        return True

    def after_move(self) -> None:
        """What follows when `to` or its like has moved each layer on its own."""
        if self.holds:
            return
        weights, _ = self._parameters()
        if len({(each.dtype, each.device) for each in weights}) == 1:
            self.join()
        else:
            self.take_apart()

    def take_apart(self) -> None:
        """Give each layer a weight and a class of its own again."""
        for layer in self._layers:
            layer.__class__ = self._class
            del layer.fused, layer.place
        for whole, parameters in zip((self.weight, self.bias), self._parameters(), strict=True):
            for parameter in parameters:
                if whole is not None and parameter.untyped_storage()._cdata == whole.untyped_storage()._cdata:
                    parameter.data = parameter.data.clone()

    def outputs(self, place: int, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer at `place` returns for `hidden`."""
        latest = self._latest if place else None
        if latest is None or latest[0] is not hidden:
            # The others do so too where another thread has replaced what the first one left.
            latest = hidden, self._product(hidden, self.weight, self.bias).split(self._sizes, dim=-1)
        if place == 0:
            self._latest = latest
        elif place == len(self._layers) - 1:
            self._latest = None
        return latest[1][place]


class FusedLinear(nn.Linear):
    """A layer whose weight is a part of that of `fused`."""

    fused: Fused
    place: int
    # As in `Linear`.
    scale = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # Hooks that wrapped this method call it also after `take_apart`.
        fused = getattr(self, "fused", None)
        if fused is not None and not (torch.compiler.is_compiling() or fused.holds):
            fused.take_apart()
            fused = None
        if fused is None:
            return type(self).forward(self, hidden)
        if torch.is_grad_enabled() and self.weight.requires_grad:
            return F.linear(hidden, self.weight, self.bias)
        return fused.outputs(self.place, hidden)

    def _apply(self, fn: Callable, recurse: bool = True):
        super()._apply(fn, recurse)
        if self is self.fused._layers[-1]:
            self.fused.after_move()
        return self


def projections(network: nn.Module) -> Iterator[list[nn.Linear]]:
    """The layers of a network that have one input and can be fused; those below adapters too.

    Raises:
        ValueError: if weights are quantised or divided over devices.
    """
    for module in network.modules():
        for names in PROJECTIONS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            layers = [getattr(layer, "base_layer", layer) for layer in layers]
            if not all(isinstance(layer, nn.Linear) for layer in layers):
                continue
            _check(layers)
            alike = {
                (type(layer), layer.in_features, layer.weight.dtype, layer.weight.device, layer.bias is None)
                for layer in layers
            }
            if len(alike) == 1 and type(layers[0]) in (nn.Linear, Linear):
                yield layers


def fused_in(network: nn.Module) -> list[Fused]:
    """What is fused in a network."""
    found = {module.fused: None for module in network.modules() if isinstance(module, FusedLinear)}
    return list(found)


def _check(layers: Sequence[nn.Linear]) -> None:
    for layer in layers:
        weight = layer.weight
        if is_divided(weight):
            raise ValueError("the weights are divided over devices: call fuse_projections before they are divided")
        packed = hasattr(weight, "__tensor_flatten__") or hasattr(weight, "quant_state")
        if packed or hasattr(layer, "_diffusers_hook") or not weight.is_floating_point() or weight.itemsize < 2:
            raise ValueError(
                "the weights are quantised, or cast by hooks: load them in full precision to fuse projections"
            )
