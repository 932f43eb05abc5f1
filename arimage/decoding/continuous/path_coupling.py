"""Coupling of denoising paths: generates several continuous tokens of a `CausalLatentModel` per forward pass, exactly.

A path holds the S + 1 values of a token before and after each of its S denoising steps, from noise to the clean token.
The head gives the density of a whole path, but not the density of the clean token alone.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from ..contract.distribution import LatentSampling, by_lane
from ..contract.models import CausalLatentModel
from ..contract.noise import Purpose, normals, uniforms
from ..contract.state import CursorState, not_finite


Coupling = Literal["reflection", "path"]
# How many candidates are sampled at once for a path from a residual distribution.
CANDIDATES = 32


@dataclass
class PathState(CursorState):
    """Adds to `CursorState`, for a window of W positions and S denoising steps:

    Attributes:
        window: W.
        paths: float32 [B, N + W, S + 1, D], the path of each position, with its clean token at [:, :, 0]. Positions
            without a path hold the noise that the path starts from and that its steps add.
        means: float32 [B, N + W, S, D], the means of the distributions that the steps of a path were sampled from.
        held: bool [B, N + W], which positions have a path.
        stds: float32 [B, S, 1], the standard deviations of the steps.
        conditions: [G, B, N + W, C], the conditions of the head when it sampled the path; None where they are not
            needed.

    `tokens` are float32 [B, N, D], zeros where nothing has been sampled yet.
    """

    image_dims = {"accepted": 1, "conditions": 1}
    structure = frozenset({"window"})

    model: CausalLatentModel
    sampling: LatentSampling
    window: int
    paths: torch.FloatTensor
    means: torch.FloatTensor
    held: torch.BoolTensor
    stds: torch.FloatTensor
    conditions: torch.Tensor | None

    @property
    def step_variant(self) -> Hashable:
        # Where conditions are kept, the host reads how many paths are sampled again.
        return None if self.conditions is not None else (self.window, self.cache.attended_slots)

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.furthest - 1, self.window

    def guidance(self, positions: torch.LongTensor) -> torch.FloatTensor:
        """The guidance scales [B, Q, 1] of `positions` [B, Q]."""
        return self.sampling.guidance_at(positions / self.model.num_tokens)[..., None]

    @property
    def temperature(self) -> Any:
        """The temperature: a number, or [B, 1, 1]."""
        return by_lane(self.sampling.temperature, 3)

    def row(self, values: torch.Tensor, positions: torch.LongTensor) -> torch.Tensor:
        """The `values` [B, P, ...] at `positions` [B, Q]."""
        index = positions.view(*positions.shape, *[1] * (values.ndim - 2))
        return values.gather(1, index.expand(-1, -1, *values.shape[2:]))

    def write_paths(self, positions: torch.LongTensor, paths: torch.FloatTensor, means: torch.FloatTensor) -> None:
        """Store `paths` [B, Q, S + 1, D], sampled with `means` [B, Q, S, D], at `positions` [B, Q]. The positions
        after the window are initialised with copies of its last token."""
        images = torch.arange(len(positions), device=positions.device)[:, None]
        self.paths[images, positions], self.means[images, positions] = paths, means
        self.held.scatter_(1, positions, True)
        self.token_buffer[images, positions] = paths[:, :, 0]
        behind = positions[:, -1:] + torch.arange(1, self.window + 1, device=positions.device)
        self.token_buffer[images, behind] = paths[:, -1:, 0].expand(-1, self.window, -1)

    def check_paths(self, paths: torch.FloatTensor, live: torch.BoolTensor) -> None:
        """Mark images as `invalid` where the tokens of `paths` [B, Q, S + 1, D] are not finite at `live` positions
        [B, Q]."""
        self.invalid |= (not_finite(paths[:, :, 0]) & live).any(1)


def start_paths(
    model: CausalLatentModel,
    sampling: LatentSampling,
    seeds: torch.LongTensor,
    window: int,
    state_class: type[PathState] = PathState,
    *,
    keep_conditions: bool = False,
    **buffers,
) -> PathState:
    """Prefill and decide rank 0. `buffers` are the fields that `state_class` adds to `PathState`."""
    cache, conditions = model.prefill(len(seeds))
    window, steps = min(window, model.num_tokens), sampling.num_denoising_steps
    size = model.num_tokens + window
    every = torch.arange(size, device=model.device).expand(len(seeds), -1)
    noise = [
        normals(seeds, every, torch.full_like(seeds, step), Purpose.DENOISE, model.dim) for step in range(steps + 1)
    ]
    paths = torch.stack(noise, dim=2)
    branches, *_, width = conditions.shape
    state = state_class.open(
        model,
        sampling,
        seeds,
        cache,
        cursor=torch.zeros_like(seeds),
        window=window,
        paths=paths,
        means=torch.zeros_like(paths[:, :, 1:]),
        held=torch.zeros_like(every, dtype=torch.bool),
        stds=torch.zeros(len(seeds), steps, 1, device=model.device, dtype=torch.float32),
        conditions=conditions.new_zeros(branches, len(seeds), size, width) if keep_conditions else None,
        **buffers,
    )
    state.token_buffer = torch.zeros(len(seeds), size + window, model.dim, device=model.device, dtype=torch.float32)
    first = every[:, :1]
    path, means, stds = sample_paths(
        model, sampling, state.temperature, conditions[:, :, None], state.guidance(first), paths[:, :1]
    )
    state.stds.copy_(state.temperature * stds)
    state.head_calls += steps
    state.check_paths(path, torch.ones_like(first, dtype=torch.bool))
    state.write_paths(first, path, means)
    if state.conditions is not None:
        state.conditions[:, :, 0] = conditions
    state.advance(torch.ones_like(seeds))
    return state


def sample_paths(
    model: CausalLatentModel,
    sampling: LatentSampling,
    temperature: Any,
    conditions: torch.Tensor,
    guidance: torch.FloatTensor,
    noise: torch.FloatTensor,
) -> tuple[torch.FloatTensor, torch.FloatTensor, torch.FloatTensor]:
    """Sample paths [B, Q, S + 1, D], given their `temperature`, a number or [B, 1, 1], `conditions` [G, B, Q, C],
    `guidance` [B, Q, 1] and `noise` [B, Q, S + 1, D]. Also returns the means [B, Q, S, D] and the standard deviations
    [S, 1] of the steps at temperature 1."""
    path, means, stds = [noise[:, :, -1]], [], []
    for step in reversed(range(noise.shape[2] - 1)):
        mean, std = model.denoise(step, path[-1], conditions, guidance, sampling.num_diffusion_steps)
        path.append(mean + temperature * std * noise[:, :, step])
        means.append(mean)
        stds.append(std.flatten()[:1])
    return torch.stack(path[::-1], 2), torch.stack(means[::-1], 2), torch.stack(stds[::-1])


def log_ratio(
    paths: torch.FloatTensor, means: torch.FloatTensor, others: torch.FloatTensor, stds: torch.FloatTensor
) -> torch.FloatTensor:
    """The logarithm [B, Q] of the ratio of two densities of `paths` [B, Q, S + 1, D]: with the `means` [B, Q, S, D] of
    the steps, over that with the means `others`. The standard deviations of the steps are `stds` [B, S, 1]."""
    tokens = paths[:, :, :-1]
    return ((means - others) * (tokens - (means + others) / 2) / stds.square()[:, None]).sum((-2, -1))


def step_window(state: PathState, coupling: Coupling | Literal["none"]) -> None:
    """Evaluate the window, couple its paths to their new distributions, and decide the tokens up to and including the
    first one that changed."""
    model, batch = state.model, len(state.seeds)
    offsets = torch.arange(state.window, device=model.device)
    positions = state.cursor[:, None] + offsets
    live, before = positions < model.num_tokens, positions - 1
    conditions = model.forward(state.row(state.token_buffer, before), torch.where(live, before, -1), state.cache)
    paths, means, kept = _COUPLE[coupling](state, positions, live, conditions)
    state.check_paths(paths, live)
    if state.conditions is not None:
        images = torch.arange(batch, device=model.device)[:, None]
        # Under torch.autocast they may have another dtype than those of the prefill.
        state.conditions[:, images, positions] = conditions.to(state.conditions.dtype)
    last = positions[:, -1:]
    end = torch.where(kept, last, positions).amin(1) + 1
    state.write_paths(positions, paths, means)
    state.advance(end.clamp(max=model.num_tokens))


def fresh_paths(
    state: PathState, positions: torch.LongTensor, live: torch.BoolTensor, conditions: torch.Tensor
) -> tuple[torch.FloatTensor, torch.FloatTensor, torch.BoolTensor]:
    """Sample the paths [B, W, S + 1, D] of `positions` [B, W] from the stored noise. Returns them, their means, and
    True [B, W]: every token is decided."""
    noise = state.row(state.paths, positions)
    guidance = state.guidance(positions)
    paths, means, _ = sample_paths(state.model, state.sampling, state.temperature, conditions, guidance, noise)
    state.head_calls += means.shape[2]
    return paths, means, torch.ones_like(live)


def reflect_paths(
    state: PathState, positions: torch.LongTensor, live: torch.BoolTensor, conditions: torch.Tensor
) -> tuple[torch.FloatTensor, torch.FloatTensor, torch.BoolTensor]:
    """Couple the held paths at `positions` [B, W] to their new `conditions` [G, B, W, C] by reflection. Returns the
    new paths [B, W, S + 1, D], their means, and which tokens did not change [B, W].

    The new path is sampled step by step next to the held one. In each step the two meet with the largest possible
    probability. Where they do not, the new path takes the reflected noise of the held one, so that they may meet
    later.
    """
    guidance, held = state.guidance(positions), state.row(state.held, positions)[..., None]
    before, means = state.row(state.paths, positions), state.row(state.means, positions)
    steps = means.shape[2]
    numbers = uniforms(state.seeds, positions, state.steps, Purpose.VERIFY, steps).log()
    path, new_means, kept = [before[:, :, -1]], [], held[..., 0]
    for step in reversed(range(steps)):
        mean, _ = state.model.denoise(step, path[-1], conditions, guidance, state.sampling.num_diffusion_steps)
        std, token = state.stds[:, step, None], before[:, :, step]
        # Where no path is held, the new path takes the stored noise.
        draft = torch.where(held, token, mean + std * token)
        old = torch.where(held, means[:, :, step], mean)
        noise, gap = (draft - old) / std, (old - mean) / std
        kept = numbers[..., step] <= -(gap * (noise + gap / 2)).sum(-1)
        direction = F.normalize(gap, dim=-1)
        reflected = noise - 2 * (direction * noise).sum(-1, keepdim=True) * direction
        path.append(torch.where(kept[..., None], draft, mean + std * reflected))
        new_means.append(mean)
    state.head_calls += steps
    return torch.stack(path[::-1], 2), torch.stack(new_means[::-1], 2), kept & held[..., 0]


def test_paths(
    state: PathState, positions: torch.LongTensor, live: torch.BoolTensor, conditions: torch.Tensor
) -> tuple[torch.FloatTensor, torch.FloatTensor, torch.BoolTensor]:
    """As `reflect_paths`, but a held path is kept as a whole, with a probability given by the ratio of its densities,
    or else replaced by a sample from the residual distribution."""
    held = state.row(state.held, positions) & live
    paths, means = state.row(state.paths, positions), state.row(state.means, positions)
    guidance, diffusion = state.guidance(positions), state.sampling.num_diffusion_steps
    new_means = state.model.denoise_paths(paths[:, :, 1:], conditions, guidance, diffusion)
    numbers = uniforms(state.seeds, positions, state.steps, Purpose.VERIFY, 1)[..., 0].log()
    kept = held & (numbers <= log_ratio(paths, new_means, means, state.stds))
    state.head_calls += 1
    assert state.conditions is not None
    old = torch.stack([state.row(group, positions) for group in state.conditions])

    def old_means(candidates, images, slots):
        return state.model.denoise_paths(candidates, old[:, images, slots], guidance[images, slots], diffusion)

    sample_again(state, positions, conditions, live & ~held, held & ~kept, old_means, paths, new_means)
    return paths, new_means, kept


_COUPLE = {"none": fresh_paths, "reflection": reflect_paths, "path": test_paths}


def sample_again(
    state: PathState,
    positions: torch.LongTensor,
    conditions: torch.Tensor,
    fresh: torch.BoolTensor,
    rejected: torch.BoolTensor,
    draft_means: Callable[[torch.FloatTensor, torch.LongTensor, torch.LongTensor], torch.FloatTensor],
    paths: torch.FloatTensor,
    means: torch.FloatTensor,
) -> None:
    """Write new `paths` [B, W, S + 1, D] and their `means` [B, W, S, D] in place, given the `conditions` [G, B, W, C]
    of `positions` [B, W]. Where `fresh`, a path is sampled with the noise that `paths` holds. Where `rejected`, it is
    sampled from the residual distribution, proportional to max(p - q, 0) with the density p of a path now and q when
    drafted. Synchronizes with the device: the number of candidates depends on the data.

    Args:
        draft_means: called with candidate paths [R, K, S, D] before their steps, and the images [R, 1] and columns [R,
            1] of the window that they are for; returns the means [R, K, S, D] with which they would have been drafted.
    """
    guidance, temperature = state.guidance(positions), state.temperature
    size, dim = paths.shape[2:]
    images, slots = fresh.nonzero(as_tuple=True)
    noise, tries = paths[images, slots], 0
    todo = rejected.nonzero(as_tuple=True)
    while len(images) or len(todo[0]):
        at = positions[todo][:, None]
        # A step number that no pass and no other try uses.
        count = state.steps[todo[0]] + tries * len(state.accepted)
        more = normals(state.seeds[todo[0]], at, count, Purpose.CANDIDATE, CANDIDATES * size * dim)
        chosen = [part.repeat_interleave(CANDIDATES) for part in todo]
        queries = torch.cat([images, chosen[0]]), torch.cat([slots, chosen[1]])
        found, found_means, _ = sample_paths(
            state.model,
            state.sampling,
            temperature[queries[0]] if state.sampling.stacked else temperature,
            conditions[:, queries[0], queries[1]][:, :, None],
            guidance[queries][:, None],
            torch.cat([noise, more.view(-1, size, dim)])[:, None],
        )
        state.head_calls += size - 1
        found, found_means = found[:, 0], found_means[:, 0]
        paths[images, slots], means[images, slots] = found[: len(images)], found_means[: len(images)]
        found, found_means = (
            part[len(images) :].unflatten(0, (-1, CANDIDATES)) if len(todo[0]) else part[:0, None]
            for part in (found, found_means)
        )
        if len(todo[0]):
            drafted = draft_means(found[:, :, 1:], todo[0][:, None], todo[1][:, None])
            state.head_calls += 1
            ratio = log_ratio(found, drafted, found_means, state.stds[todo[0]]).exp()
            numbers = uniforms(state.seeds[todo[0]], at, count, Purpose.REFRESH, CANDIDATES)[:, 0]
            # Paths that are not finite pass, so that the loop ends and the image is refused later.
            passes = ~(numbers < ratio)
            hit, first = passes.any(1), passes.to(torch.uint8).argmax(1)
            row = torch.arange(len(hit), device=hit.device)
            done = todo[0][hit], todo[1][hit]
            paths[done], means[done] = found[row, first][hit], found_means[row, first][hit]
            todo = todo[0][~hit], todo[1][~hit]
        images, slots, noise, tries = images[:0], slots[:0], noise[:0], tries + 1
