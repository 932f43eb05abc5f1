"""The layers of language models by the kernels of a step, which read the weights where transformers keeps them."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    ChameleonModel,
    Emu3TextModel,
    GlmImageTextModel,
    LlamaModel,
    Qwen2Model,
    Qwen3Model,
)
from transformers.activations import SiLUActivation
from transformers.models.chameleon.modeling_chameleon import ChameleonDecoderLayer

from ..kernels.linear.int8 import PackedWeight
from . import step
from .fused import FusedLinear
from .layers import Linear
from .quantized import QuantizedLinear
from .step import PACKAGE, has_weights_like, is_hooked, reads_weights
from .step_layer import Norm, StepLayer, Weight, norm_of, weight_of
from .two_vocabularies import TwoVocabularyModel


def attention_of(layer: Any) -> dict[str, Any]:
    """What layers of all kinds have."""
    parts = layer.self_attn
    projections = parts.q_proj, parts.k_proj, parts.v_proj
    return {
        "norms": (norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)),
        "projections": tuple(map(weight_of, projections)),
        "biases": [each.bias for each in projections if each.bias is not None],
        "head_dim": parts.head_dim,
        "out": weight_of(parts.o_proj),
    }


def gated_by(layer: Any) -> dict[str, Any]:
    return {"gate": weight_of(layer.gate_proj), "up": weight_of(layer.up_proj), "down": weight_of(layer.down_proj)}


def llama(layer: Any) -> StepLayer:
    return StepLayer(**attention_of(layer), **gated_by(layer.mlp))


def qwen3(layer: Any) -> StepLayer:
    head_norms = norm_of(layer.self_attn.q_norm), norm_of(layer.self_attn.k_norm)
    return StepLayer(**attention_of(layer), **gated_by(layer.mlp), head_norms=head_norms)


def chameleon(layer: Any) -> StepLayer:
    # Its norms have an epsilon of their own, whatever they were given.
    query, key = (Norm(norm.weight, 1e-5, norm.bias) for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm))
    return StepLayer(**attention_of(layer), **gated_by(layer.mlp), head_norms=(query, key))


def glm_image(layer: Any) -> StepLayer:
    gate, up = weight_of(layer.mlp.gate_up_proj), None
    # What is packed has no parts.
    if not isinstance(gate.weight, PackedWeight):
        weights, scale = gate.weight.tensor_split(2), gate.scale
        gate, up = map(Weight, weights, [None, None] if scale is None else scale.tensor_split(2))
    sum_norms = norm_of(layer.post_self_attn_layernorm), norm_of(layer.post_mlp_layernorm)
    down = weight_of(layer.mlp.down_proj)
    return StepLayer(**attention_of(layer), gate=gate, up=up, down=down, sum_norms=sum_norms)


def two_vocabularies(layer: Any) -> StepLayer:
    """No token of an image step is text."""
    parts = attention_of(layer) | gated_by(getattr(layer, "gen_mlp", None) or layer.mlp)
    query = getattr(layer.self_attn, "q_norm", None)
    return StepLayer(**parts, head_norms=query and (norm_of(query), norm_of(layer.self_attn.k_norm)))


PARTS: dict[type, Callable[[Any], StepLayer]] = {
    LlamaModel: llama,
    Emu3TextModel: llama,
    Qwen2Model: llama,
    Qwen3Model: qwen3,
    ChameleonModel: chameleon,
    GlmImageTextModel: glm_image,
    TwoVocabularyModel: two_vocabularies,
}
# Where the classes of their modules are from.
ORIGINS = (PACKAGE, "torch.nn.modules.", "transformers.models.", "transformers.activations")
LINEAR = (nn.Linear, Linear, FusedLinear, QuantizedLinear)


def parts_of(decoder: nn.Module) -> Callable[[Any], StepLayer] | None:
    """How a step reads the layers of a decoder; None if it does not know them."""
    if isinstance(decoder, TwoVocabularyModel):
        return PARTS[TwoVocabularyModel]
    return PARTS.get(type(decoder))


def misfit(decoder: nn.Module) -> str | None:
    """Why forward passes of a decoder take its layers in torch; None if they take the kernels of a step, whatever the
    number of rows. See `runs_kernels`."""
    return next(_misfits(decoder, kernels=True), None)


def misfit_in_torch(decoder: nn.Module) -> str | None:
    """Why forward passes of a decoder take its modules on a CPU; None if they take `run_layers`."""
    return next(_misfits(decoder, kernels=False), None)


def _misfits(decoder: Any, kernels: bool) -> Iterator[str]:
    if parts_of(decoder) is None:
        yield f"{type(decoder).__name__} is not known"
        return
    if not step.ENABLED:
        yield "ARIMAGE_STEP_KERNELS is 0"
    if torch.is_grad_enabled() or any(map(torch.is_autocast_enabled, ("cuda", "cpu"))) or decoder.training:
        yield "they are trained, or run in autocast"
    weight, config = decoder.norm.weight, decoder.config
    if kernels and weight.dtype not in step.DTYPES:
        yield f"the weights are {weight.dtype}"
    if kernels and not step.has_kernels(weight):
        yield "the device has no kernels"
    if not kernels and config._attn_implementation == "eager":
        yield "attention is eager"
    if decoder.rotary_emb.rope_type in ("dynamic", "longrope"):
        yield f"positions are {decoder.rotary_emb.rope_type}"
    if is_hooked(decoder) or decoder._compiled_call_impl is not None:
        yield "the decoder has hooks, or was compiled"
    for layer in decoder.layers:
        yield from _misfits_of(layer, weight, reads_weights if kernels else has_weights_like)
    sliding = getattr(config, "use_sliding_window", False) and "sliding_attention" in (config.layer_types or ())
    if sliding or kernels and decoder.layers[0].self_attn.head_dim not in step.HEAD_DIMS:
        yield "attention slides, or its heads have another width"


def _misfits_of(layer: Any, like: torch.Tensor, reads: Callable[[nn.Module, torch.Tensor], bool]) -> Iterator[str]:
    for module in layer.modules():
        kind = type(module)
        name = kind.__name__
        if not (kind.__module__.startswith(ORIGINS) and kind.forward.__module__.startswith(ORIGINS)):
            yield f"{name} is not known"
        elif is_hooked(module) or module._compiled_call_impl is not None:
            yield f"{name} has hooks, or was compiled"
        elif not reads(module, like):
            yield f"the weights of {name} are elsewhere, of another dtype or kind, or of a width that no kernel takes"
    parts, feed = layer.self_attn, getattr(layer, "gen_mlp", None) or layer.mlp
    products = [module for module in layer.modules() if hasattr(module, "in_features")]
    if not all(type(module) in LINEAR for module in products):
        yield "linear layers are of another kind"
    elif len({isinstance(each, QuantizedLinear) for each in (parts.q_proj, parts.k_proj, parts.v_proj)}) > 1:
        yield "some weights of a layer have 8 bits, others not"
    elif any(each.bias is not None for each in products if each not in (parts.q_proj, parts.k_proj, parts.v_proj)):
        yield "linear layers have biases"
    elif not isinstance(getattr(feed, "act_fn", None) or feed.activation_fn, nn.SiLU | SiLUActivation):
        yield "the feed-forward layer has another activation"
    elif parts.scaling != parts.head_dim**-0.5:
        yield "attention has another scale"
    elif type(parts).__name__.startswith("Chameleon") and type(layer) is not ChameleonDecoderLayer:
        yield f"{type(layer).__name__} is not known"


def turn_table(decoder: Any, like: torch.Tensor, positions: torch.LongTensor) -> torch.FloatTensor:
    """The cosines and sines of `positions` [rows, P] or [axes, rows, P], as the decoder rounds them to the dtype of
    `like`: [rows * P, turned / 2, 2] in float32."""
    cos, sin = (turns.tensor_split(2, dim=-1)[0] for turns in decoder.rotary_emb(like, positions))
    return torch.stack([cos, sin], dim=-1).float().flatten(0, 1)
