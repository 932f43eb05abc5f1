"""Continuous speculative decoding as its authors released it: a smaller masked model drafts tokens, and the model
tests them."""

import math
from dataclasses import dataclass

import torch

from ..contract.distribution import LatentSampling, Sampling
from ..contract.models import MaskedLatentModel
from ..contract.noise import Purpose, normals, uniforms
from ..contract.settings import check_number, check_settings
from ..contract.supports import DecodingMethod
from .latents import MaskedLatentState, conditions_of, denoise, open_masked, write_set


# How often a rejected token is sampled again before it is set to zero.
TRIES = 100


@dataclass
class DraftedState(MaskedLatentState):
    """A `MaskedLatentState` whose steps decide several sets."""

    @property
    def step_variant(self) -> None:
        return None


@dataclass(frozen=True)
class ContinuousSpeculativeDecoding(DecodingMethod):
    """Continuous speculative decoding (CSpD, https://arxiv.org/abs/2411.11925) of a `MaskedLatentModel` with a
    drafter, as in the authors' code. Not exact, and without a bound.

    The model decides the first sets. Then the drafter decides `window` sets, one after another, and one forward pass
    of the model tests them all. That pass does not see the drafts, so it tests against the distribution of the model
    with larger sets. The fair comparison is therefore `mar` with as few forward passes, which needs no drafter. Both
    heads use the same noise. The test compares the normal distributions of the last denoising step, widened by `heat`,
    of two different paths, so it accepts tokens near those that the model would have sampled. A rejected token is
    sampled again around the model's own.

    Attributes:
        window: sets that the drafter decides per forward pass of the model, >= 1.
        target_share: the share of the sets that the model decides alone at the beginning, 0 to 1.
        heat: factor on the width of the normal distributions in the test, above 0. 1 rejects nearly all drafts.
    """

    window: int = 4
    target_share: float = 0.05
    heat: float = 42.0

    exact = False
    needs = {"masked_latents": ("drafter",)}

    def __post_init__(self):
        check_settings(self, {"window": 1})
        check_number(self, "target_share", 0, 1)
        check_number(self, "heat", 1e-6)

    def start(self, model: MaskedLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> MaskedLatentState:
        """Decide the first sets.

        Raises:
            ValueError: if there are more steps than tokens.
        """
        assert isinstance(sampling, LatentSampling)
        state = open_masked(model, sampling, seeds, DraftedState)
        self.step(state)
        return state

    def step(self, state: MaskedLatentState) -> None:
        if state.over:
            return
        model, decided, visible = state.model, state.decided.clone(), state.sets[state.taken].visible
        drafter, sets, steps = model.drafter, state.num_steps, state.sampling.num_diffusion_steps
        assert drafter is not None
        alone = state.taken < math.ceil(self.target_share * sets)
        drafts, first = [], state.taken
        for _ in range(1 if alone else min(self.window, sets - first)):
            before, after = state.masked[state.taken], state.masked[state.taken + 1]
            positions, live = state.next_set(before, after)
            count = state.sets[state.taken].visible
            one = model if alone else drafter
            conditions = conditions_of(state, one, positions, state.decided, count)
            tokens, stds = denoise(state, one, conditions, positions, after, steps)
            drafts.append((positions, live, tokens, torch.stack(stds)))
            write_set(state, positions, live, tokens)
        positions, live, tokens = (torch.cat([draft[part] for draft in drafts], dim=1) for part in range(3))
        if not alone:
            conditions = conditions_of(state, model, positions, decided, visible)
            own, own_stds = denoise(state, model, conditions, positions, after, steps)
            draft_stds = torch.cat([draft[3] for draft in drafts], dim=2)
            tokens = self._test(state, positions, tokens, draft_stds, own, torch.stack(own_stds))
            # The sets of the window are written again, and the next set is the one after them.
            state.taken -= 1
            write_set(state, positions, live, tokens)
        state.record_set(live, after)

    def _test(
        self,
        state: MaskedLatentState,
        positions: torch.LongTensor,
        drafts: torch.FloatTensor,
        draft_stds: torch.FloatTensor,
        own: torch.FloatTensor,
        own_stds: torch.FloatTensor,
    ) -> torch.FloatTensor:
        """The tokens [B, Q, D] at `positions` [B, Q]: accepted drafts, and elsewhere samples near the model's `own`.
        `draft_stds` and `own_stds` are [S, B, Q, D]."""
        # As published, though it is the inverse of the correct factor for the densities of paths with the same noise.
        paths = (own_stds[1:].log() - draft_stds[1:].log()).sum((0, -1))
        p, q = own_stds[0], draft_stds[0]
        off = -((drafts - own) / (self.heat * p)).square().sum(-1) / 2
        numbers = uniforms(state.seeds, positions, None, Purpose.VERIFY, 1 + TRIES)
        accepted = numbers[..., 0].log() < off + (q.log() - p.log()).sum(-1) + paths
        noise = normals(state.seeds, positions, None, Purpose.CANDIDATE, TRIES * own.shape[-1])
        again = own[..., None, :] + p[..., None, :] * noise.unflatten(-1, (TRIES, -1))
        of_own = -((again - own[..., None, :]) / p[..., None, :]).square().sum(-1) / 2 - p.log().sum(-1, keepdim=True)
        of_draft = -((again - drafts[..., None, :]) / q[..., None, :]).square().sum(-1) / 2
        ratio = (of_draft - q.log().sum(-1, keepdim=True) - of_own - paths[..., None]).exp()
        passes = numbers[..., 1:] < 1 - ratio
        first = passes.to(torch.uint8).argmax(-1)[..., None, None].expand(-1, -1, 1, own.shape[-1])
        replaced = torch.where(passes.any(-1, keepdim=True), again.gather(2, first).squeeze(2), 0)
        return torch.where(accepted[..., None], drafts, replaced)
