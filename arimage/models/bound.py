"""What the models of all kinds share: a network with the conditions of the images of one call."""

import copy
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from .conditions import Conditions, Names, with_unconditional
from .layers import causal_mask


class BoundNetwork:
    """Base of the models in `arimage.decoding.contract.models`.

    Args:
        network: runs the forward passes: a transformer, or what `torch.compile` made of it.
        conditions: the `Conditions` of the images.
        codebook: the vectors of the tokens in the image tokenizer [V, D], on any device, since that may be offloaded.

    Attributes:
        companions: the names of attributes that are models bound to the same images, or None.
        reads_values: whether every forward pass reads the values of the conditions, and not the prefill alone.
        device: where its tensors live.
        branches: rows per image, see `Conditions`.
        num_tokens: N tokens per image.
    """

    num_tokens: int

    companions: ClassVar[tuple[str, ...]] = ()
    reads_values: ClassVar[bool] = False

    # A tensor in some models, None in others.
    codebook: Any
    # See `BoundModel` in `arimage.decoding.contract.models`.
    compact = False

    def __init__(self, network: Any, conditions: Conditions, codebook: torch.Tensor | None = None):
        self.network, self.conditions, self.branches = network, conditions, conditions.branches
        self.device = conditions.seen.device
        self.codebook = None if codebook is None else codebook.to(self.device)

    @property
    def put_key(self) -> Hashable:
        """See `TokenModel.put`."""
        return self.network, self.conditions.key, self._companion_keys

    @property
    def _companion_keys(self) -> tuple[Hashable, ...]:
        return tuple(companion.put_key for _, companion in self._companions())

    @property
    def condition(self) -> dict[str, torch.Tensor]:
        """The conditions of every row by name, as the network takes them."""
        return self.conditions.values

    def take(self, images: torch.LongTensor) -> Self:
        """See `TokenModel.take`."""
        other = copy.copy(self)
        other.conditions = self.conditions.take(images)
        for name, companion in self._companions():
            setattr(other, name, companion.take(images))
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """See `TokenModel.put`."""
        if self.codebook is not None:
            # It was looked up again: weights may have changed in place since.
            self.codebook.copy_(other.codebook)
        put = self.conditions.put_values if self.reads_values else self.conditions.put
        replaced, theirs = put(images, other.conditions), dict(other._companions())
        for name, companion in self._companions():
            replaced |= name in theirs and companion.put(images, theirs[name])
        return replaced

    def merge_prompts(self, *names: Names) -> None:
        """Prefill equal conditions once; see `Conditions.merge`."""
        if not self.reads_values:
            self.conditions.merge(*names)
        for _, companion in self._companions():
            companion.merge_prompts(*names)

    def _companions(self) -> list[tuple[str, Any]]:
        named = [(name, getattr(self, name)) for name in self.companions]
        return [(name, companion) for name, companion in named if companion is not None]

    def open_prefill(
        self,
        kind: type,
        batch_size: int,
        *,
        layers: int | None = None,
        slots: int | None = None,
        filled: int = 0,
        shared: bool = True,
        **options,
    ) -> tuple[Any, dict[str, torch.Tensor], Sequence[int]]:
        """An empty cache of this kind, and the conditions that a prefill computes; see `Conditions.to_prefill`.

        Args:
            layers, slots: how many the cache has, by default those of the network and N.
            filled: how many of the first slots the prefill fills.

        Raises:
            ValueError: if the model is bound to another number of images.
        """
        condition, copies = self.conditions.to_prefill(batch_size, shared)
        config = self.network.config
        cache = kind(
            config.num_layers if layers is None else layers,
            len(next(iter(condition.values()))),
            config.get("num_key_value_heads") or config.num_attention_heads,
            self.network.head_dim,
            prefix_length=self.conditions.prefix_length,
            slots=self.num_tokens if slots is None else slots,
            filled=filled if self.compact else None,
            branches=self.branches,
            dtype=self.network.dtype,
            device=self.device,
            **options,
        )
        return cache, condition, copies


class BoundTokenModel(BoundNetwork):
    """Base of the models whose tokens have a `Layout`, which each has by one forward pass of its own unless it says
    otherwise.

    Args:
        network, conditions, codebook: see `BoundNetwork`.
        layout: the `Layout` of the tokens.
    """

    predicts_groups: ClassVar[bool] = False

    drafter = neighbours = context = None
    denoises = False
    block = 1

    def __init__(self, network: Any, conditions: Conditions, layout, codebook: torch.Tensor | None = None):
        super().__init__(network, conditions, codebook)
        self.layout, self.num_tokens = layout, layout.num_tokens


class PrefixModel(BoundTokenModel):
    """Base of the `TokenModel`s whose transformer reads a condition as a prefix.

    Args:
        transformer: the transformer, or what `torch.compile` made of it. Every forward pass calls it.
        condition: arguments of its `embed_condition`, one row per image.
        layout: the `Layout` of the image tokens.
        guided: also compute the logits without the condition.
        codebook: the vectors of the tokens in the image tokenizer [V, D], for `TokenModel.codebook`.
    """

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        layout,
        *,
        guided: bool = False,
        codebook: torch.Tensor | None = None,
    ):
        condition = with_unconditional(condition, kept=("prompt_attention_mask",)) if guided else condition
        seen = transformer.prefix_mask(**condition)
        super().__init__(transformer, Conditions(condition, 1 + guided, seen, alike=True), layout, codebook)
        self.transformer = transformer

    @property
    def vocab_size(self) -> int:
        return self.transformer.config.vocab_size

    @property
    def put_key(self) -> Hashable:
        return super().put_key, self.layout.shape, self.layout.order is None

    def take(self, images: torch.LongTensor) -> Self:
        other = super().take(images)
        other.layout = self.layout.take(images)
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        self.layout.put(images, other.layout)
        return super().put(images, other)

    def write_prefix(self, cache, condition: dict[str, torch.Tensor]) -> torch.BoolTensor:
        """Let the next forward pass write the prefixes [R, P] to the cache. Returns which keys each of their positions
        sees, [R, P, K]: the visible ones before it, and itself."""
        mask = self.transformer.prefix_mask(**condition)
        cache.write_prompts(*mask.shape)
        return F.pad(causal_mask(mask, 0), (cache.prefix_end - mask.shape[1], 0))
