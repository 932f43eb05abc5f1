"""Collaborative decoding: a large next-scale model draws the first maps, a small one those after them."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .distribution import Sampling
from .interface import ScaleModel
from .next_scale import NextScaleDecoding, ScaleState
from .settings import check_settings


@dataclass
class CollaborativeState(ScaleState):
    """Adds to `ScaleState`: `drafted`, the latents after each scale that the large model drew, until it is done. `model` and
    `cache` are those of the model at work."""

    drafted: list[torch.FloatTensor] = field(default_factory=list)


@dataclass(frozen=True)
class CollaborativeDecoding:
    """Collaborative decoding (CoDe, https://arxiv.org/abs/2411.17787): the model draws the first maps, which hold the layout
    and few codes, its refiner the others, which hold most of the codes and of the time.

    The refiner reads all maps drawn so far in the pass that predicts its first one, so `forward_passes`, those of either
    network, is the number of scales as in `NextScaleDecoding`. The keys and values of the model are freed before the refiner
    allocates its own.

    Not exact, without a bound: nothing verifies the refiner's maps, which follow its law and not the model's. It is
    `NextScaleDecoding` where the two are the same network.

    Attributes:
        drafter_scales: how many maps the model draws, 1 .. K - 1 of K; by default all but the last two.
        more_smooth: as in `NextScaleDecoding`.

    Raises:
        ValueError: if `drafter_scales` is no whole number of at least 1; at the start, if it leaves nothing to the refiner, or
            if there is none.
    """

    drafter_scales: int | None = None
    more_smooth: bool = False

    exact: ClassVar[bool] = False

    def __post_init__(self):
        check_settings(self, {} if self.drafter_scales is None else {"drafter_scales": 1}, {})

    def start(self, model: ScaleModel, sampling: Sampling, seeds: torch.LongTensor) -> CollaborativeState:
        if model.refiner is None:
            raise ValueError("collaborative decoding needs a second, smaller model: give the pipeline a refiner")
        if self._handover(model) >= len(model.scales):
            raise ValueError(
                f"drafter_scales is {self.drafter_scales}: give at most {len(model.scales) - 1} of this model's "
                f"{len(model.scales)} scales"
            )
        state = CollaborativeState(**vars(self._next_scale.start(model, sampling, seeds)))
        state.drafted.append(state.latents)
        return state

    def step(self, state: CollaborativeState) -> CollaborativeState:
        passes, handover = state.forward_passes, self._handover(state.model)
        if passes == handover:
            state.model, state.cache = state.model.refiner, None
            state.cache, logits = state.model.prefill(len(state.seeds), state.drafted)
            state.drafted = []
            return self._next_scale.commit(state, logits)
        state = self._next_scale.step(state)
        if passes < handover:
            state.drafted.append(state.latents)
        return state

    @property
    def _next_scale(self) -> NextScaleDecoding:
        return NextScaleDecoding(self.more_smooth)

    def _handover(self, model: ScaleModel) -> int:
        return self.drafter_scales or max(len(model.scales) - 2, 1)
