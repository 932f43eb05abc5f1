"""What decodings of a `MaskedTokenModel` share: their state, and a step of which the sampler decides the tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from ..contract.distribution import Sampling
from ..contract.models import MaskedTokenModel
from ..contract.supports import DecodingMethod
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
        self.record_set(live, after)
        self.taken += 1


@dataclass
class GroupTokenState(GroupState, MaskedTokenState):
    """A `MaskedTokenState` whose steps may belong to groups."""


Evaluate = Callable[[torch.LongTensor], torch.Tensor]
"""From places [B, Q], N where there is none, to their logits [G, B, Q, V]."""
_State = TypeVar("_State", bound=MaskedTokenState)


class TokenSampler(DecodingMethod):
    """Base of the decodings that decide a set of tokens in each forward pass. Others decide with one of these, but
    evaluate less."""

    needs = {"masked_tokens": ()}

    def num_steps(self, model: MaskedTokenModel) -> int:
        """The number of forward passes for images of this model."""
        ...

    def open(
        self, model: MaskedTokenModel, sampling: Sampling, seeds: torch.LongTensor, state_class: type[_State]
    ) -> _State:
        """A state in which only the given tokens are decided."""
        ...

    def plan(self, state: MaskedTokenState) -> None:
        """Called once it is known which steps belong to groups."""

    def decide(self, state: MaskedTokenState, evaluate: Evaluate, last: torch.LongTensor | None = None) -> None:
        """Decide the next set, given a function from places to their logits. The `last` [B] undecided tokens, by
        default none, do not belong to it."""
        ...

    def start(self, model: MaskedTokenModel, sampling: Sampling, seeds: torch.LongTensor) -> MaskedTokenState:
        """Decide the first set."""
        state = self.open(model, sampling, seeds, MaskedTokenState)
        self.plan(state)
        self.step(state)
        return state

    def step(self, state: MaskedTokenState) -> None:
        if not state.over:
            self.decide(state, lambda places: state.model.forward(state.tokens, places))


class SampledDecoding(DecodingMethod):
    """Base of the decodings that decide tokens as a `sampler` does, in `steps` that often evaluate less."""

    steps: int | None
    sampler: Any

    def __post_init__(self):
        if not isinstance(self.sampler, TokenSampler):
            raise ValueError(f"sampler is {self.sampler!r}: give a HaltonDecoding or a ConfidenceDecoding")

    def num_steps(self, model: MaskedTokenModel) -> int:
        """The number of forward passes for images of this model."""
        return self._sampler.num_steps(model)

    @property
    def _sampler(self) -> TokenSampler:
        return replace(self.sampler, steps=self.steps or self.sampler.steps)


def given_tokens(sampling: Sampling) -> torch.BoolTensor | None:
    """Which places [B, N] have given tokens; None if there are none."""
    return None if sampling.forced is None else sampling.forced >= 0
