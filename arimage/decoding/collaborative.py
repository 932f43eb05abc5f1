"""Collaborative decoding: a large next-scale model generates the first maps, a small one the remaining maps."""

from dataclasses import dataclass, field

import torch

from .contract.distribution import Sampling
from .contract.models import ScaleModel
from .contract.settings import check_settings
from .contract.supports import DecodingMethod
from .next_scale import NextScaleDecoding, ScaleState


@dataclass
class CollaborativeState(ScaleState):
    """Adds to `ScaleState`: `drafted`, the latents after each scale of the large model, until that model is done.
    `model` and `cache` belong to the model in use."""

    settled = frozenset({"drafted"})

    drafted: list[torch.FloatTensor] = field(default_factory=list)

    @property
    def replaceable(self) -> bool:
        return False

    @property
    def step_variant(self) -> None:
        return None

    def keep_latents(self) -> None:
        assert self.latents is not None
        self.drafted.append(self.latents.clone())


@dataclass(frozen=True)
class CollaborativeDecoding(DecodingMethod):
    """Collaborative decoding (CoDe, https://arxiv.org/abs/2411.17787): the model generates the first maps, which
    determine the layout and have few tokens. Its refiner generates the others, which have most of the tokens and take
    most of the time.

    The refiner reads all maps so far in the forward pass that predicts its first one, so `forward_passes`, which
    counts both networks, is the number of scales, as in `NextScaleDecoding`. The keys and values of the model are
    freed before the refiner allocates its own.

    Not exact, and without a bound: nothing verifies the refiner's maps, which follow its own distribution and not the
    model's. If both are the same network, the result is that of `NextScaleDecoding`.

    Attributes:
        drafter_scales: the number of maps that the model generates, 1 .. K - 1 of K; None is all but the last two.
        more_smooth: as in `NextScaleDecoding`.
    """

    drafter_scales: int | None = None
    more_smooth: bool = False

    exact = False
    needs = {"scales": ("refiner",)}

    def __post_init__(self):
        check_settings(self, {"drafter_scales": 1}, {"more_smooth": (True, False)})

    def misfit(self, model: ScaleModel) -> str | None:
        if self._handover(model) >= len(model.scales):
            return f"drafter_scales is {self.drafter_scales}: give at most {len(model.scales) - 1}"
        return self._next_scale.misfit(model)

    def start(self, model: ScaleModel, sampling: Sampling, seeds: torch.LongTensor) -> CollaborativeState:
        state = self._next_scale.open(CollaborativeState, model, sampling, seeds)
        state.keep_latents()
        return state

    def step(self, state: CollaborativeState) -> None:
        if state.over:
            return
        handover = self._handover(state.model)
        if state.taken == handover:
            assert state.model.refiner is not None
            state.model, state.cache = state.model.refiner, None
            state.cache, logits = state.model.prefill(len(state.seeds), state.drafted)
            state.drafted = []
            self._next_scale.commit(state, logits)
            return
        drafting = state.taken < handover
        self._next_scale.step(state)
        if drafting:
            state.keep_latents()

    @property
    def _next_scale(self) -> NextScaleDecoding:
        return NextScaleDecoding(self.more_smooth)

    def _handover(self, model: ScaleModel) -> int:
        return self.drafter_scales or max(len(model.scales) - 2, 1)
