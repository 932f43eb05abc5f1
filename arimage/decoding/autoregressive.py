"""One token per forward pass: the distribution that every exact decoding reproduces."""

from dataclasses import dataclass

import torch

from ..kernels.coupling import sample
from .distribution import Sampling
from .interface import TokenModel, generates_latents_in_turn, needs_tokens
from .noise import Purpose, uniforms
from .path_coupling import LatentSampling, PathState, start_paths, step_window
from .state import DecodingState


def decide_first(state: DecodingState, logits: torch.FloatTensor) -> None:
    """Sample the token of rank 0 from what a prefill returned, logits [G, B, V]."""
    _decide_next(state, logits[:, :, None], state.finished.logical_not())


def _decide_next(state: DecodingState, logits: torch.FloatTensor, running: torch.BoolTensor) -> None:
    """Decide one more token of the images that are `running` [B]; what the others get is thrown away."""
    position = state.steps[:, None]
    probabilities = state.probabilities(logits, position, running[:, None])
    token = sample(probabilities, uniforms(state.seeds, position, Purpose.SAMPLE, None, 1)[..., 0])
    state.token_buffer.scatter_(1, position, token)
    state.record(running.long())
    torch.eq(state.steps, state.model.num_tokens, out=state.finished)


@dataclass
class AutoregressiveState(DecodingState):
    """A `DecodingState` whose images are decided from the first token on."""

    model: TokenModel

    @property
    def replaceable(self) -> bool:
        return True

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.steps.max(), 1


@dataclass(frozen=True)
class AutoregressiveDecoding:
    """Sample the tokens one after another: N forward passes per image. Of a `CausalLatentModel` it samples continuous tokens, and
    the last denoising step adds noise, as any other."""

    exact = True

    def supports(self, model: TokenModel) -> str | None:
        return None if generates_latents_in_turn(model) else needs_tokens(model)

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> AutoregressiveState | PathState:
        if generates_latents_in_turn(model):
            assert isinstance(sampling, LatentSampling)
            return start_paths(model, sampling, seeds, window=1)
        cache, logits = model.prefill(len(seeds))
        state = AutoregressiveState.open(model, sampling, seeds, cache)
        decide_first(state, logits)
        return state

    def step(self, state: AutoregressiveState | PathState) -> None:
        if isinstance(state, PathState):
            step_window(state, "reflection")
            return
        last, running = state.steps[:, None] - 1, ~state.finished
        positions = torch.where(running[:, None], last, -1)
        logits = state.model.forward(state.token_buffer.gather(1, last), positions, state.cache)
        _decide_next(state, logits, running)
