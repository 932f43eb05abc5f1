"""A small model of what tokens the tokens next to them make likely."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ..settings.schema import Count, Width, checked
from .layers import Linear, init_normal
from .mixin import ModelMixin


class NeighbourModel(ModelMixin, ConfigMixin):
    """Predicts a token from those to the left, above, above left and above right of it alone, as a log-bilinear model:
    its logits are linear in the sum of one vector per neighbour. For the `corrections` of
    `SpeculativeJacobiDecoding`, see `Neighbours` in `arimage.decoding.contract.models`.

    Args:
        vocab_size (`int`): V, the transformer's.
        rank (`int`): width of the vectors.
    """

    offsets: ClassVar[tuple[tuple[int, int], ...]] = ((0, -1), (-1, 0), (-1, -1), (-1, 1))
    reads_features: ClassVar[bool] = False

    @register_to_config
    @checked
    def __init__(self, vocab_size: Count = 16384, rank: Width = 32):
        super().__init__()
        # The vectors of each neighbour in turn; the first of them are for none.
        self.vectors = nn.Embedding(len(self.offsets) * (vocab_size + 1), rank)
        self.out_proj = Linear(rank, vocab_size)
        init_normal(self, 0.1)

    def _sums(self, tokens: torch.LongTensor) -> torch.Tensor:
        first = torch.arange(len(self.offsets), device=tokens.device) * (self.config.vocab_size + 1)
        return self.vectors(first + 1 + tokens).sum(-2, dtype=torch.float32)

    def forward(self, around: torch.LongTensor) -> torch.Tensor:
        """The logits [B, Q, V] of tokens with the neighbours `around` them [B, Q, 4]; -1 is none."""
        return self.out_proj(self._sums(around).to(self.dtype))

    def change(
        self, now: torch.LongTensor, before: torch.LongTensor, features: torch.Tensor | None = None
    ) -> torch.FloatTensor:
        """See `Neighbours.change`."""
        return F.linear(self._sums(now) - self._sums(before), self.out_proj.weight.float())
