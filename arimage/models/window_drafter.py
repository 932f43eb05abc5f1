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
from .neighbours import NeighbourModel


Offset = tuple[Annotated[int, Field(strict=True, ge=-16, le=0)], Annotated[int, Field(strict=True, ge=-16, le=16)]]
FURTHER = ((0, -2), (0, -3), (-1, 2), (-1, -2))


class WindowDrafter(ModelMixin, ConfigMixin):
    """Predicts how the guided logits of a token change with the tokens next to it, from the feature that the
    transformer computed for it when these were others: a multilayer perceptron for each token by itself, added to a
    `NeighbourModel`, whose place it takes in the `corrections` of `SpeculativeJacobiDecoding`, see `Neighbours` in
    `arimage.decoding.contract.models`.

    Args:
        vocab_size, feature_size (`int`): V and D, the transformer's vocabulary and width.
        rank, table_rank (`int`): width of the embeddings of tokens, and rank of the `NeighbourModel`.
        hidden_size (`int`): width of the hidden layer.
        dropout (`float`): of the hidden layer, in training.
        further (`list[list[int]]`): the rows and columns from a token to those that it reads besides the four of a
            `NeighbourModel`.
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
        table_rank: Width = 32,
        further: Annotated[tuple[Offset, ...], Field(max_length=64)] = FURTHER,
    ):
        super().__init__()
        self.offsets = offsets = [*NeighbourModel.offsets, *map(tuple, further)]
        self.table = NeighbourModel(vocab_size, table_rank)
        # The first one is for none.
        self.embedding = nn.Embedding(vocab_size + 1, rank)
        self.now = Linear(len(offsets) * rank, hidden_size, bias=False)
        self.before = Linear(len(offsets) * rank, hidden_size, bias=False)
        self.feature = Linear(feature_size, hidden_size)
        self.shift = Linear(hidden_size, feature_size)
        self.scale = Linear(hidden_size, feature_size)
        self.head = Linear(feature_size, vocab_size, bias=False)

    @classmethod
    def for_transformer(cls, transformer: nn.Module, table: NeighbourModel | None = None, **shape) -> Self:
        """A drafter to train, with the transformer's own `head`. It begins as the model of neighbours `table`, or as
        one that changes nothing."""
        if table is not None:
            shape["table_rank"] = table.config.rank
        drafter = cls(transformer.config.vocab_size, transformer.config.hidden_size, **shape)
        with torch.no_grad():
            init_normal(drafter, 0.05)
            nn.init.normal_(drafter.embedding.weight, std=0.5)
            drafter.before.weight.copy_(-drafter.now.weight)
            for layer in (drafter.shift, drafter.scale):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)
            drafter.head.weight.copy_(transformer.head.weight)
            if table is None:
                init_normal(drafter.table, 0.1)
                nn.init.zeros_(drafter.table.out_proj.weight)
            else:
                drafter.table.load_state_dict(table.state_dict())
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
        near = len(NeighbourModel.offsets)
        change = change + self.table.change(now[..., :near], before[..., :near])
        return change * (now != before).any(-1, keepdim=True)
