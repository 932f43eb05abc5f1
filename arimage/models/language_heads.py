"""The heads of language models that generate images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation

from ..kernels.divided import is_divided
from ..kernels.linear import linear as product
from ..kernels.step.linear import linear
from .layer_in_torch import run_perceptron
from .quantized import PERCEPTRONS, QuantizedLinear, pack_weights
from .step import has_weights_like, is_hooked, reads_weights
from .step_layer import Norm, Weight, weight_of


@dataclass(frozen=True)
class CodeHead:
    """The part of a head that computes the logits of `count` image tokens, whose ids in the language model start at
    `first`. It multiplies only these rows of the weight, unless the weight is offloaded, quantised or divided over
    devices, or the head is another layer, such as one with an adapter. Of a prompt, which may have more channels than
    hidden states, it reads the first `width`; None for all."""

    lm_head: nn.Linear
    first: int
    count: int
    width: int | None = None

    @property
    def weight(self) -> torch.Tensor | None:
        """These rows; None if the whole head is needed."""
        weight = self.lm_head.weight
        whole = weight.is_floating_point() and not (weight.is_meta or is_divided(weight))
        # Hooks of diffusers bring the weight, or cast it, only for the forward pass of the module.
        if type(self.lm_head) is not nn.Linear or not whole or hasattr(self.lm_head, "_diffusers_hook"):
            return None
        return weight[self.first : self.first + self.count]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weight, hidden = self.weight, hidden[..., : self.width]
        if weight is None:
            return self.lm_head(hidden)[..., self.first : self.first + self.count]
        return product(hidden.to(weight.device), weight)


class CodeEmbedding:
    """The inputs of a language model for image tokens, which `aligner`, one of `PERCEPTRONS`, makes of their vectors
    in `embedding`."""

    def __init__(self, embedding: nn.Module, aligner: nn.Module):
        self.embedding, self.aligner = embedding, aligner

    def __call__(self, tokens: torch.LongTensor) -> torch.Tensor:
        vectors = self.embedding(tokens)
        if vectors.device.type == "cpu" and not torch.compiler.is_compiling():
            layers = perceptron_layers(self.aligner, vectors, has_weights_like)
            if layers is not None:
                return run_perceptron(vectors, layers)
        return self.aligner(vectors)


# Weights and biases of linear layers with a GELU after each but the last.
HeadLayers = list[tuple[Weight, torch.Tensor | None]]


def perceptron_layers(
    module: Any, like: torch.Tensor, reads: Callable[[nn.Module, torch.Tensor], bool]
) -> HeadLayers | None:
    """The weights and biases of one of `PERCEPTRONS` whose weights one `reads`, given its input; None of another
    module."""
    if type(module).__name__ not in PERCEPTRONS or type(module.activation_fn) is not GELUActivation:
        return None
    layers = PERCEPTRONS[type(module).__name__](module)
    plain = not any(is_hooked(each) or each._compiled_call_impl is not None for each in (module, *layers))
    plain = plain and all(type(each) in (nn.Linear, QuantizedLinear) and reads(each, like) for each in layers)
    if not plain:
        return None
    pack_weights(module, like)
    return [(weight_of(each), each.bias) for each in layers]


def head_layers(
    head: Any, like: torch.Tensor, reads: Callable[[nn.Module, torch.Tensor], bool] = reads_weights
) -> HeadLayers | None:
    """The weights and biases of a head that the kernels of a step compute, or what else `reads` them, with a GELU
    after each but the last, given its input; None of another head."""
    if isinstance(head, CodeHead):
        weight = head.weight
        plain = weight is not None and reads(head.lm_head, like) and not is_hooked(head.lm_head)
        return [(Weight(weight), None)] if weight is not None and plain else None
    return perceptron_layers(head, like, reads)


def step_head(
    hidden: torch.Tensor,
    norm: Norm,
    layers: HeadLayers,
    index: torch.LongTensor | None,
) -> torch.Tensor:
    """The logits [R, V] of the rows `index` [R], or all, of `hidden`, in one launch per layer if they are few."""
    options = {"gain": norm.weight, "eps": norm.eps, "index": index}
    for weight, bias in layers[:-1]:
        hidden, options = linear(hidden, weight.weight, scale=weight.scale, bias=bias, gelu=True, **options), {}
    weight, bias = layers[-1]
    return linear(hidden, weight.weight, scale=weight.scale, bias=bias, **options)
