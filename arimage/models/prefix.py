"""Token models whose transformer reads a condition as a prefix of the image tokens."""

from collections.abc import Hashable
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from .bound import BoundTokenModel
from .conditions import Conditions, with_unconditional
from .layers import causal_mask


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
