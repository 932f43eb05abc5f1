"""Token models whose transformer reads a condition as a prefix of the image tokens."""

import copy
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn

from .conditions import Conditions, Names, put_codebook, with_unconditional
from .layers import causal_mask


class PrefixModel:
    """Base of the `TokenModel`s whose transformer reads a condition as a prefix.

    Args:
        transformer: the transformer, or what `torch.compile` made of it. Every forward pass calls it.
        condition: arguments of its `embed_condition`, one row per image.
        layout: the `Layout` of the image tokens.
        guided: also compute the logits without the condition.
        codebook: the vectors of the tokens in the image tokenizer [V, D], for `TokenModel.codebook`.
    """

    predicts_groups: ClassVar[bool] = False

    drafter = None
    denoises = False
    block = 1
    # See `Cache`.
    compact = False

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
        self.groups = 2 if guided else 1
        self.conditions = Conditions(condition, self.groups, seen=transformer.prefix_mask(**condition))
        self.transformer, self.layout, self.network = transformer, layout, transformer
        self.num_tokens = layout.num_tokens
        self.device = next(iter(condition.values())).device
        # The tokenizer may be offloaded.
        self.codebook = None if codebook is None else codebook.to(self.device)

    @property
    def vocab_size(self) -> int:
        return self.transformer.config.vocab_size

    @property
    def put_key(self) -> Hashable:
        """See `TokenModel.put`."""
        return self.network, self.layout.shape, self.layout.order is None, self.conditions.key

    @property
    def condition(self) -> dict[str, torch.Tensor]:
        """Arguments of the transformer's `embed_condition` for every row."""
        return self.conditions.values

    def take(self, images: torch.LongTensor) -> Self:
        """See `TokenModel.take`."""
        other = copy.copy(self)
        other.conditions, other.layout = self.conditions.take(images), self.layout.take(images)
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """See `TokenModel.put`."""
        self.layout.put(images, other.layout)
        put_codebook(self, other)
        return self.conditions.put(images, other.conditions)

    def merge_prompts(self, prompts: Names = None) -> None:
        """Prefill equal conditions once; see `Conditions.merge`."""
        # The embeddings of all rows without a condition are equal.
        self.conditions.merge(prompts, [None] * self.conditions.images)

    def open_prefill(
        self,
        kind: type,
        batch_size: int,
        layers: int,
        heads: int,
        scratch: int,
        shared: bool = True,
        filled: int = 0,
        slots: int | None = None,
    ) -> tuple[Any, dict[str, torch.Tensor], Sequence[int]]:
        """An empty cache of this kind, with N or so many `slots`, for the conditions that a prefill computes, which
        fills the first `filled` slots, and these conditions; see `Conditions.to_prefill`.

        Raises:
            ValueError: if the model is bound to another number of images.
        """
        condition, copies = self.conditions.to_prefill(batch_size, shared)
        cache = kind(
            layers,
            len(next(iter(condition.values()))),
            heads,
            self.transformer.head_dim,
            prefix=self.conditions.length,
            slots=slots or self.num_tokens,
            scratch=scratch,
            filled=filled if self.compact else None,
            groups=self.groups,
            dtype=self.transformer.dtype,
            device=self.device,
        )
        return cache, condition, copies

    def write_prefix(self, cache, condition: dict[str, torch.Tensor]) -> torch.BoolTensor:
        """Let the next forward pass write the prefixes [R, P] to the cache. Returns which keys each of their positions
        sees, [R, P, K]: the visible ones before it, and itself."""
        mask = self.transformer.prefix_mask(**condition)
        cache.write_prompts(*mask.shape)
        return F.pad(causal_mask(mask, 0), (cache.prefix - mask.shape[1], 0))
