"""Speculative decoding of continuous tokens: a smaller model drafts denoising paths, and the model tests them."""

from dataclasses import dataclass
from typing import Any

import torch

from ..contract.distribution import LatentSampling, Sampling
from ..contract.layout import Layout
from ..contract.models import CausalLatentModel
from ..contract.noise import Purpose, uniforms
from ..contract.settings import check_settings
from ..contract.supports import DecodingMethod
from .path_coupling import PathState, log_ratio, sample_again, sample_paths, start_paths


@dataclass
class PathDraftState(PathState):
    """Adds to `PathState`: `draft_cache`, the cache of the drafter. Undecided positions do not hold paths."""

    caches = ("cache", "draft_cache")

    draft_cache: Any

    @property
    def step_variant(self) -> None:
        return None


@dataclass(frozen=True)
class PathSpeculativeDecoding(DecodingMethod):
    """Speculative decoding of a `CausalLatentModel` with a drafter, exact.

    The drafter generates `window` tokens one after another. One forward pass of the model then evaluates all of them,
    and one call of its head gives the density of every draft's whole denoising path. A draft is accepted with a
    probability given by the ratio of the densities. The first rejected one is replaced by a sample from the residual
    distribution (by rejection sampling, 32 candidates at a time). If all are accepted, one more token is sampled. The
    last denoising step adds noise, as in `PathJacobiDecoding`. `forward_passes` counts those of the model only;
    `head_calls` counts both heads.

    Attributes:
        window: drafts per step, >= 1.
    """

    window: int = 4

    exact = True
    needs = {"causal_latents": ("noise", "drafter")}

    def __post_init__(self):
        check_settings(self, {"window": 1})

    def positions(self, layout: Layout) -> int | None:
        return 2 * min(self.window, layout.num_tokens) + 1

    def start(self, model: CausalLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> PathState:
        assert isinstance(sampling, LatentSampling) and model.drafter is not None
        draft_cache, _ = model.drafter.prefill(len(seeds))
        # The window also holds the token that follows the drafts.
        return start_paths(
            model, sampling, seeds, min(self.window, model.num_tokens) + 1, PathDraftState, draft_cache=draft_cache
        )

    def step(self, state: PathDraftState) -> None:
        model, drafter, sampling = state.model, state.model.drafter, state.sampling
        assert drafter is not None
        positions = state.cursor[:, None] + torch.arange(state.window, device=model.device)
        live, before = positions < model.num_tokens, positions - 1
        guidance, noise = state.guidance(positions), state.row(state.paths, positions)
        temperature = state.temperature
        # If all drafts were accepted, the drafter has not seen the token before the last decided one yet.
        at = torch.where(live[:, :1], torch.cat([before[:, :1] - 1, before[:, :1]], dim=1), -1)
        token = state.row(state.token_buffer, at.clamp(min=0))
        fed, drafts, draft_means, draft_conditions = [token[:, 1:]], [], [], []
        for j in range(state.window - 1):
            condition = drafter.forward(token, at, state.draft_cache)[:, :, -1:]
            one = guidance[:, j : j + 1], noise[:, j : j + 1]
            path, means, _ = sample_paths(drafter, sampling, temperature, condition, *one)
            token = path[:, :, 0]
            for parts, part in zip(
                (drafts, draft_means, draft_conditions, fed), (path, means, condition, token), strict=True
            ):
                parts.append(part)
            at = torch.where(live[:, j + 1 : j + 2], positions[:, j : j + 1], -1)
            state.head_calls += noise.shape[2] - 1
        # The last position has no draft; it is the additional token.
        paths = torch.cat([*drafts, noise[:, -1:]], dim=1)
        conditions = model.forward(torch.cat(fed, dim=1), torch.where(live, before, -1), state.cache)
        drafted, drafter_conditions = torch.cat(draft_means, dim=1), torch.cat(draft_conditions, dim=2)
        diffusion = sampling.num_diffusion_steps
        means = model.denoise_paths(paths[:, :, 1:], conditions, guidance, diffusion)
        state.head_calls += 1
        numbers = uniforms(state.seeds, positions[:, :-1], state.steps, Purpose.VERIFY, 1)[..., 0].log()
        passes = numbers <= log_ratio(paths[:, :-1], means[:, :-1], drafted, state.stds)
        # Whether all earlier drafts were accepted; the first rejected one is sampled again.
        reached = torch.cat([torch.ones_like(passes[:, :1]), passes.cumprod(1).bool()], dim=1)
        rejected = live & reached
        rejected[:, :-1] &= ~passes
        fresh = rejected.clone()
        fresh[:, :-1], rejected[:, -1] = False, False

        def means_of_drafts(candidates, images, slots):
            return drafter.denoise_paths(
                candidates, drafter_conditions[:, images, slots], guidance[images, slots], diffusion
            )

        sample_again(state, positions, conditions, fresh, rejected, means_of_drafts, paths, means)
        state.check_paths(paths, live & reached)
        images = torch.arange(len(positions), device=positions.device)[:, None]
        state.token_buffer[images, positions] = paths[:, :, 0]
        state.advance((state.cursor + reached.sum(1)).clamp(max=model.num_tokens))
