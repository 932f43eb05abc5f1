"""A small network that drafts a window of tokens from the features that a transformer computed for older drafts."""

from typing import Annotated, ClassVar, Self

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from pydantic import Field
from torch import nn

from ..settings.schema import Count, Share, Width, checked
from .layers import Linear, init_normal
from .mixin import ModelMixin


Offset = tuple[Annotated[int, Field(strict=True, ge=-16, le=0)], Annotated[int, Field(strict=True, ge=-16, le=16)]]
OFFSETS = ((0, -1), (-1, 0), (-1, -1), (-1, 1), (0, -2), (0, -3), (-1, 2), (-1, -2))


class WindowDrafter(ModelMixin, ConfigMixin):
    """Predicts how the guided logits of a token change with the tokens next to it, from the feature that the
    transformer computed for it when these were others: a multilayer perceptron for each token by itself. It takes the
    place of a `NeighbourModel` in the `corrections` of `SpeculativeJacobiDecoding`, see `Neighbours` in
    `arimage.decoding.contract.models`.

    Args:
        vocab_size, feature_size (`int`): V and D, the transformer's vocabulary and width.
        rank (`int`): width of the embeddings of tokens.
        hidden_size (`int`): width of the hidden layer.
        dropout (`float`): of the hidden layer, in training.
        offsets (`list[list[int]]`): the rows and columns from a token to those next to it that it reads.
    """

    reads_features: ClassVar[bool] = True

    @register_to_config
    @checked
    def __init__(
        self,
        vocab_size: Count = 16384,
        feature_size: Width = 768,
        rank: Width = 48,
        hidden_size: Width = 384,
        dropout: Share = 0.2,
        offsets: Annotated[tuple[Offset, ...], Field(min_length=1, max_length=64)] = OFFSETS,
    ):
        super().__init__()
        self.offsets = [tuple(offset) for offset in offsets]
        # The first one is for none.
        self.embedding = nn.Embedding(vocab_size + 1, rank)
        self.now = Linear(len(offsets) * rank, hidden_size, bias=False)
        self.before = Linear(len(offsets) * rank, hidden_size, bias=False)
        self.feature = Linear(feature_size, hidden_size)
        self.shift = Linear(hidden_size, feature_size)
        self.scale = Linear(hidden_size, feature_size)
        self.head = Linear(feature_size, vocab_size, bias=False)

    @classmethod
    def for_transformer(cls, transformer: nn.Module, **shape) -> Self:
        """A drafter to train, which changes nothing at first. It begins with the transformer's own `head`."""
        drafter = cls(transformer.config.vocab_size, transformer.config.hidden_size, **shape)
        with torch.no_grad():
            init_normal(drafter, 0.05)
            nn.init.normal_(drafter.embedding.weight, std=0.5)
            drafter.before.weight.copy_(-drafter.now.weight)
            for layer in (drafter.shift, drafter.scale):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
            drafter.head.weight.copy_(transformer.head.weight)
        return drafter

    def change(
        self, now: torch.LongTensor, before: torch.LongTensor, features: torch.Tensor | None = None
    ) -> torch.FloatTensor:
        """See `Neighbours.change`: [B, Q, V]. Nothing changes where the tokens are the same: otherwise drafts that
        are right already would be sampled again in every step, and those after them would never settle."""
        assert features is not None
        features = features.to(self.dtype)
        tokens = self.now(self.embedding(now + 1).flatten(-2)) + self.before(self.embedding(before + 1).flatten(-2))
        hidden = F.gelu(self.feature(features) + tokens)
        hidden = F.dropout(hidden, self.config.dropout, self.training)
        change = self.head(self.shift(hidden) + self.scale(hidden) * features).float()
        return change * (now != before).any(-1, keepdim=True)
