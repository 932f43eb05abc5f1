"""Models of published shapes, bound to the conditions of a call, on PyTorch's default device: on fake tensors they
need no weights and no memory. Each family has its own in the file of its name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from arimage.decoding import LatentSampling, Layout, Sampling
from arimage.models.language_model import LanguageTokenModel


PROMPT = 32
# Sizes that a CPU builds in a moment.
NARROW = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


class Bound(NamedTuple):
    """A model bound to the images of one call, how its tokens are sampled, how many K/V slots its image has, and the
    networks whose weights count."""

    model: Any
    sampling: Sampling | LatentSampling
    slots: int
    networks: tuple[nn.Module, ...]


Bind = Callable[[int], Bound]


@dataclass(frozen=True)
class Published:
    """A published model.

    Attributes:
        layers: their number.
        build: makes the model with any number of layers, and binds it to a batch.
        decodings: whose steps are counted and compared with the committed table.
        tiny: arguments of `build` for a model of the same family that a CPU builds in a moment; empty: there is none.
    """

    layers: int
    build: Callable[..., Bind]
    decodings: tuple[str, ...] = ()
    tiny: Mapping[str, Any] = field(default_factory=dict)


def build(make: Callable[[], nn.Module], dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The module that `make` returns, with weights of `dtype`: fake weights cannot be cast."""
    torch.set_default_dtype(dtype)
    try:
        return make().eval()
    finally:
        torch.set_default_dtype(torch.float32)


def class_condition(batch: int) -> dict[str, torch.Tensor]:
    return {"class_labels": torch.zeros(batch, dtype=torch.long)}


def text_condition(batch: int, length: int, width: int) -> dict[str, torch.Tensor]:
    embeds = torch.zeros(batch, length, width, dtype=torch.bfloat16)
    return {"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(batch, length, dtype=torch.long)}


def any_order(layers: int, transformer: type, token_model: type) -> Bind:
    network = build(lambda: transformer(num_layers=layers))

    def bind(batch: int) -> Bound:
        layout = Layout((16, 16))
        # The check of an order reads the host.
        layout.order, layout._rank_of = torch.zeros(2, batch, 256, dtype=torch.long)
        model = token_model(network, class_condition(batch), layout, guided=True)
        return Bound(model, Sampling(guidance_scale=4.0), 256, (network,))

    return bind


def language_model(
    decoder: nn.Module,
    embed: Callable,
    head: Callable,
    shape: tuple[int, int],
    batch: int,
    row_end: int | None = None,
) -> LanguageTokenModel:
    return LanguageTokenModel(
        decoder,
        embed=embed,
        head=head,
        layout=Layout(shape),
        input_ids=torch.zeros(2 * batch, PROMPT, dtype=torch.long),
        row_end=row_end,
        branches=2,
    )
