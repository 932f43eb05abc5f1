"""Next-scale decoding: all codes of a map in one pass, from the coarsest map to the finest."""

from dataclasses import dataclass, replace

import torch

from ..kernels.coupling import sample
from .distribution import Sampling
from .interface import ScaleModel
from .noise import Purpose, exponentials, uniforms
from .state import DecodingState


@dataclass
class ScaleState(DecodingState):
    """Adds to `DecodingState`: `latents` [B, D, P, P], what the maps so far add up to. `tokens` holds the maps one after
    another from coarse to fine, each row by row; `forward_passes` of them are decided."""

    latents: torch.FloatTensor = None

    @property
    def max_passes(self) -> int:
        return len(self.model.scales)


def scale_probabilities(
    model: ScaleModel, sampling: Sampling, scale: int, logits: torch.FloatTensor
) -> tuple[torch.FloatTensor, torch.LongTensor]:
    """The law [B, n, V] of the codes of `scale` by their logits [G, B, n, V], and their positions [B, n] among all codes.

    Guidance grows along the scales: of K scales, scale k uses 1 + (guidance_scale - 1) k / (K - 1).
    """
    ratio = scale / max(len(model.scales) - 1, 1)
    first = sum(side**2 for side in model.scales[:scale])
    positions = first + torch.arange(logits.shape[2], device=logits.device).expand(logits.shape[1], -1)
    guidance_scale = 1 + (sampling.guidance_scale - 1) * ratio
    return replace(sampling, guidance_scale=guidance_scale).probabilities(logits, positions), positions


@dataclass(frozen=True)
class NextScaleDecoding:
    """Draw every map of a next-scale model (VAR, https://arxiv.org/abs/2404.02905) in one pass: K passes an image.

    Attributes:
        more_smooth: add up mixtures of code vectors, by Gumbel-softmax weights that sharpen along the scales, in place of
            single ones, for a smoother picture. Not exact: an image is then no combination of codes, and the reported codes
            are those of the greatest weight.
    """

    more_smooth: bool = False

    @property
    def exact(self) -> bool:
        return not self.more_smooth

    def start(self, model: ScaleModel, sampling: Sampling, seeds: torch.LongTensor) -> ScaleState:
        cache, logits = model.prefill(len(seeds))
        tokens = torch.zeros(len(seeds), model.num_tokens, dtype=torch.long, device=model.device)
        state = ScaleState(
            model=model,
            sampling=sampling,
            seeds=seeds,
            cache=cache,
            tokens=tokens,
            decided=torch.zeros_like(tokens, dtype=torch.bool),
            finished=torch.zeros_like(seeds, dtype=torch.bool),
        )
        return self.commit(state, logits)

    def step(self, state: ScaleState) -> ScaleState:
        return self.commit(state, state.model.forward(state.forward_passes, state.latents, state.cache))

    def commit(self, state: ScaleState, logits: torch.FloatTensor) -> ScaleState:
        """Decide the next map by its logits [G, B, n, V]."""
        model, scale = state.model, state.forward_passes
        law, positions = scale_probabilities(model, state.sampling, scale, logits)
        if self.more_smooth:
            ratio = scale / max(len(model.scales) - 1, 1)
            gumbel = -exponentials(state.seeds, positions, Purpose.GUMBEL, 0, model.vocab_size).log()
            temperature = max(0.27 * (1 - 0.95 * ratio), 0.005)
            weights = ((law.log() * (1 + ratio) + gumbel) / temperature).softmax(-1)
            codes = weights.argmax(-1)
            vectors = weights @ model.codebook
        else:
            codes = sample(law, uniforms(state.seeds, positions, Purpose.SAMPLE, 0, 1)[..., 0])
            vectors = model.codebook[codes]
        state.latents = model.accumulate(scale, state.latents, vectors)
        state.tokens.scatter_(1, positions, codes)
        state.decided.scatter_(1, positions, True)
        state.record(torch.full_like(state.seeds, codes.shape[1]))
        state.finished.fill_(state.forward_passes == state.max_passes)
        return state
