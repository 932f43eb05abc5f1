"""The heads of language models that generate images."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import GELUActivation

from ..kernels.divided import is_divided
from ..kernels.linear import linear as product
from ..kernels.step.linear import linear
from .step import is_hooked, reads_weights
from .step_layer import Norm


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


def head_layers(head: Any, like: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor | None]] | None:
    """The weights and biases of a head that the kernels of a step compute, with a GELU after each but the last, given
    its input; None of another head."""
    if isinstance(head, CodeHead):
        reads = head.weight is not None and reads_weights(head.lm_head, like)
        return [(head.weight, None)] if reads and not is_hooked(head.lm_head) else None
    if type(head).__name__ != "JanusVQVAEHead" or type(head.activation_fn) is not GELUActivation:
        return None
    layers = head.proj_out, head.vision_head
    plain = not any(is_hooked(each) or each._compiled_call_impl is not None for each in (head, *layers))
    plain = plain and all(type(each) is nn.Linear and reads_weights(each, like) for each in layers)
    return [(each.weight, each.bias) for each in layers] if plain else None


def step_head(
    hidden: torch.Tensor,
    norm: Norm,
    layers: list[tuple[torch.Tensor, torch.Tensor | None]],
    index: torch.LongTensor | None,
) -> torch.Tensor:
    """The logits [R, V] of the rows `index` [R], or all, of `hidden`, in one launch per layer if they are few."""
    options = {"gain": norm.weight, "eps": norm.eps, "index": index}
    for weight, bias in layers[:-1]:
        hidden, options = linear(hidden, weight, bias=bias, gelu=True, **options), {}
    weight, bias = layers[-1]
    return linear(hidden, weight, bias=bias, **options)
