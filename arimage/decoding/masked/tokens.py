"""What decodings of a `MaskedTokenModel` share: their state, and a step of which the sampler decides the tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..contract.distribution import Sampling
from ..contract.models import MaskedTokenModel
from .sets import GroupState, MaskedState


@dataclass
class MaskedTokenState(MaskedState):
    """A `MaskedState` of tokens. Those that are not decided are -1."""

    model: MaskedTokenModel

    @property
    def decided(self) -> torch.BoolTensor:
        return self.tokens >= 0

    def give(self, sampling: Sampling) -> None:
        """Write the given tokens of a new state."""
        if sampling.forced is not None:
            self.tokens.copy_(sampling.forced)

    def decide(self, places: torch.LongTensor, live: torch.BoolTensor, tokens: torch.LongTensor) -> None:
        """Decide the `tokens` [B, Q] of the next set at its `places` [B, Q] where they are `live`, and advance."""
        after = self.undecided[1]
        self.write_tokens(places, live, tokens)
        self.record(live.sum(1))
        torch.eq(after, 0, out=self.finished)
        self.taken += 1


@dataclass
class GroupTokenState(GroupState, MaskedTokenState):
    """A `MaskedTokenState` whose steps may belong to groups."""


Evaluate = Callable[[torch.LongTensor], torch.Tensor]
"""From places [B, Q], N where there is none, to their logits [G, B, Q, V]."""


def given_tokens(sampling: Sampling) -> torch.BoolTensor | None:
    """Which places [B, N] have given tokens; None if there are none."""
    return None if sampling.forced is None else sampling.forced >= 0
