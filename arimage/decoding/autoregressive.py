"""One code a forward pass: the law that every exact decoding reproduces."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..kernels.coupling import sample
from .distribution import Sampling
from .interface import TokenModel
from .noise import Purpose, uniforms
from .state import DecodingState


@dataclass(frozen=True)
class AutoregressiveDecoding:
    """Draw the codes one after another in raster order: N forward passes an image."""

    exact: ClassVar[bool] = True

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor, scratch: int = 0) -> DecodingState:
        return self.begin(model, sampling, seeds, *model.prefill(len(seeds), scratch))

    def begin(self, model, sampling, seeds, cache, logits: torch.FloatTensor) -> DecodingState:
        """Decide position 0 by what a prefill returned."""
        tokens = torch.zeros(len(seeds), model.num_tokens, dtype=torch.long, device=model.device)
        state = DecodingState(
            model=model,
            sampling=sampling,
            seeds=seeds,
            cache=cache,
            tokens=tokens,
            decided=torch.zeros_like(tokens, dtype=torch.bool),
            finished=torch.zeros_like(seeds, dtype=torch.bool),
        )
        return self._commit(state, logits[:, :, None])

    def step(self, state: DecodingState) -> DecodingState:
        position = state.forward_passes - 1
        positions = torch.full_like(state.tokens[:, :1], position)
        logits = state.model.forward(state.tokens[:, position, None], positions, state.cache)
        return self._commit(state, logits)

    def _commit(self, state: DecodingState, logits: torch.Tensor) -> DecodingState:
        position = state.forward_passes
        positions = torch.full_like(state.tokens[:, :1], position)
        law = state.sampling.probabilities(logits, positions)
        noise = uniforms(state.seeds, positions, Purpose.SAMPLE, 0, 1)
        state.tokens[:, position, None] = sample(law, noise[..., 0])
        state.decided[:, position] = True
        state.record(torch.ones_like(state.seeds))
        state.finished.fill_(position + 1 == state.model.num_tokens)
        return state
