"""Linear layers whose weights take 8 bits each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import ModelMixin
from torch import nn

from ..kernels.linear.int8 import PackedWeight, int8_product, stored_product, takes_bytes, takes_stored
from ..kernels.step import DTYPES as STEP_DTYPES
from ..kernels.step import ENABLED, MOST_ROWS, WIDTH, has_kernels
from ..kernels.step.linear import linear, scaled_product
from .layers import Linear
from .saved_files import refuse_to_save


# The largest number of each.
DTYPES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# What every step reads of models of transformers besides their decoders: linear layers with a GELU after each but the
# last, by the class of their module.
PERCEPTRONS: dict[str, Callable[[Any], Sequence[nn.Module]]] = {
    "JanusVQVAEHead": lambda head: (head.proj_out, head.vision_head),
    "JanusVQVAEAlignerMLP": lambda aligner: (aligner.fc1, *aligner.hidden_layers),
}


class QuantizedLinear(nn.Module):
    """A linear layer with weights of 8 bits, and one float32 scale per row of the weight: the largest number of a row
    becomes the largest that `dtype` has. Activations are not quantised: see `int8_product` for a CPU.

    Args:
        layer: the linear layer whose weights it rounds.
        dtype: `torch.int8` or `torch.float8_e4m3fn`.
    """

    scale: torch.Tensor

    def __init__(self, layer: nn.Linear, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        full = layer.weight.detach().float()
        # A row of zeros stays zeros.
        scale = (full.abs().amax(1) / DTYPES[dtype]).clamp(min=torch.finfo(torch.float32).tiny)
        if dtype == torch.int8:
            # As `stored_product` takes it. The largest number of a row still becomes 127.
            scale = scale.bfloat16().float()
        scaled = full / scale[:, None]
        # A parameter, which offloading layer by layer moves and `num_parameters` counts.
        weight = (scaled.round() if dtype == torch.int8 else scaled).to(dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = layer.bias

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._runs_kernel(hidden):
            rows = linear(hidden.flatten(0, -2), self.weight, scale=self.scale)
            product = rows.view(*hidden.shape[:-1], -1)
        elif takes_stored(hidden, self.weight):
            product = stored_product(hidden, self.weight, self.scale)
        elif self.packs(hidden):
            product = int8_product(hidden, self.weight, self.scale)
        else:
            product = scaled_product(hidden, self.weight, self.scale)
        return product if self.bias is None else product + self.bias

    def packs(self, hidden: torch.Tensor) -> bool:
        """Whether `int8_product` takes the product with tensors like `hidden`. Then the weight is packed as it takes
        it, when this is first asked on a CPU; on another device it is plain again."""
        if not takes_bytes(hidden, self.weight):
            return False
        if not isinstance(self.weight, PackedWeight):
            if torch.compiler.is_compiling():
                return False
            self.weight = nn.Parameter(PackedWeight.of(self.weight.data), requires_grad=False)
        return True

    def _runs_kernel(self, hidden: torch.Tensor) -> bool:
        """Whether a product of a step reads the weight as it is stored."""
        few = hidden.numel() <= MOST_ROWS * self.in_features and self.in_features % WIDTH == 0
        return (
            ENABLED and few and hidden.dtype in STEP_DTYPES and not hidden.requires_grad and has_kernels(self.weight)
        )

    def _apply(self, fn, recurse=True):
        weight, scale = self.weight.data, self.scale
        super()._apply(fn, recurse)
        # `to(dtype)` is meant for the weights of other layers.
        self.weight.data, self.scale = weight.to(self.weight.device), scale.to(self.scale.device)
        return self

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, dtype={self.weight.dtype}"


def quantizable(network: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the blocks of a transformer by name: of `network` itself, or of its decoder if it is a
    model of transformers, which may have other parts. Those of our own are followed by the head, and
    those of Janus by its `PERCEPTRONS`."""
    if isinstance(network, ModelMixin):
        names = getattr(network, "_repeated_blocks", None) or []
        blocks = [(name, part) for name, part in network.named_modules() if type(part).__name__ in names]
        blocks += [(name, part) for name, part in network.named_children() if name == "head"]
    else:
        decoder = network.get_decoder()
        blocks = [
            (name, part)
            for name, part in network.named_modules()
            if part is decoder.layers or type(part).__name__ in PERCEPTRONS
        ]
    return {
        ".".join(filter(None, (prefix, name))): part
        for prefix, block in blocks
        for name, part in block.named_modules()
        if type(part) in (nn.Linear, Linear)
    }


def quantize_linears(network: nn.Module, dtype: torch.dtype) -> None:
    """Replace the `quantizable` layers of a transformer by layers with weights in `dtype`, one after another."""
    layers = quantizable(network)
    for name in list(layers):
        # Nothing else holds its full weights then.
        network.set_submodule(name, QuantizedLinear(layers.pop(name), dtype))
    refuse_to_save(network)


def pack_weights(module: nn.Module, like: torch.Tensor) -> None:
    """Pack the weights of a module whose products with tensors like `like` `int8_product` takes."""
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            part.packs(like)


def is_quantized(network: nn.Module) -> bool:
    """Whether any layer of a module is a `QuantizedLinear`."""
    return any(isinstance(part, QuantizedLinear) for part in network.modules())
