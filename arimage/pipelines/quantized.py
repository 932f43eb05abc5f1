"""Weights of 8 bits in a pipeline."""

from typing import Any

import torch

from ..models.fused import fused_in
from ..models.quantized import DTYPES, QuantizedLinear, is_quantized, quantizable, quantize_linears
from .adapters.lora_layers import has_lora_layers


def token_network(pipe: Any) -> tuple[str, torch.nn.Module]:
    """The component that predicts the tokens, and its name."""
    key = pipe._lora_loadable_modules[0]
    return key, pipe._bare(key)


def quantize_weights(pipe: Any, dtype: torch.dtype) -> None:
    """See `ARPipeline.quantize_weights`."""
    key, network = token_network(pipe)
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}: give {' or '.join(map(str, DTYPES))}")
    if has_lora_layers(network):
        raise ValueError(
            f"the {key} has adapters: fuse and unload them, or unload them, before its weights are quantised"
        )
    if fused_in(network):
        raise ValueError("the projections are fused: call unfuse_projections before quantize_weights")
    if pipe.has_hooks:
        raise ValueError("the weights are offloaded: call quantize_weights before offloading")
    if not quantizable(network):
        raise ValueError(f"the {key} has no plain linear layers in its blocks: its weights may be quantised already")
    quantize_linears(network, dtype)


def check_full_weights(pipe: Any, method: str) -> None:
    """Refuse what a pipeline with quantised weights cannot do."""
    key, network = token_network(pipe)
    if is_quantized(network):
        raise ValueError(f"the {key} has weights of 8 bits: call {method} before quantize_weights")


def dtype_name(pipe: Any) -> str:
    """The dtype of the weights as the option --dtype names it: that of quantised ones, if there are any."""
    layers = (part for part in token_network(pipe)[1].modules() if isinstance(part, QuantizedLinear))
    layer = next(layers, None)
    dtype = pipe.dtype if layer is None else layer.weight.dtype
    return str(dtype).removeprefix("torch.").removesuffix("_e4m3fn")
