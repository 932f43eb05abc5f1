"""Masked decoding of continuous tokens: sets of tokens in a random order, one forward pass per set."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.nn.functional as F

from ..contract.distribution import LatentSampling, Sampling, by_lane
from ..contract.models import MaskedLatentModel
from ..contract.noise import Purpose, normals, random_orders
from ..contract.settings import check_several
from ..contract.state import not_finite
from ..contract.supports import DecodingMethod
from .sets import MULTIPLE, MaskedState, TokenSet, has_few_sizes, masked_counts, open_sets, rounded_up


@dataclass(frozen=True)
class LatentSet(TokenSet):
    """A `TokenSet` of continuous tokens.

    Attributes:
        visible: how many are visible before it.
        diffusion_steps: by how many denoising steps it decides, see `LatentSampling.num_diffusion_steps`.
    """

    visible: int = 0
    diffusion_steps: int | tuple[int, ...] = 0


@dataclass
class MaskedLatentState(MaskedState):
    """A `MaskedState` of continuous tokens. Adds `known_buffer` bool [B, N + 1], which places are decided. `tokens`
    are vectors, float32 [B, N, D], zeros where they are not decided."""

    model: MaskedLatentModel
    sampling: LatentSampling
    sets: Sequence[LatentSet]
    known_buffer: torch.BoolTensor

    @property
    def decided(self) -> torch.BoolTensor:
        return self.known_buffer[:, : self.model.num_tokens]


_State = TypeVar("_State", bound=MaskedLatentState)


def open_masked(
    model: MaskedLatentModel,
    sampling: LatentSampling,
    seeds: torch.LongTensor,
    state_class: type[_State],
    *,
    few_sizes: bool = False,
    **buffers,
) -> _State:
    """A state in which only the given tokens are decided. With `few_sizes`, sets are padded to few sizes. `buffers`
    are the fields that `state_class` adds.

    Raises:
        ValueError: if there are more steps than tokens.
    """
    size, steps = model.num_tokens, sampling.num_inference_steps
    if steps > size:
        raise ValueError(f"num_inference_steps is {steps}: give at most {size}, as many as an image has tokens")
    order, given = random_orders(seeds, size), None
    known = torch.zeros_like(order, dtype=torch.bool)
    tokens = torch.zeros(len(seeds), size + 1, model.dim, device=seeds.device, dtype=torch.float32)
    if sampling.forced is not None:
        known = given = ~sampling.forced.isnan().any(-1)
        tokens[:, :size] = torch.where(given[..., None], sampling.forced, 0)
    state = open_sets(
        model,
        sampling,
        seeds,
        state_class,
        order,
        given,
        partial(masked_counts, steps=steps),
        few_sizes=few_sizes,
        known_buffer=F.pad(known, (0, 1)),
        **buffers,
    )
    visible = [size - min(counts) for counts in zip(*state.schedules, strict=True)][:-1]
    if few_sizes:
        visible = [rounded_up(number, MULTIPLE, size) for number in visible]
    state.sets = [
        LatentSet(each.count, visible=number, diffusion_steps=sampling.num_diffusion_steps)
        for each, number in zip(state.sets, visible, strict=True)
    ]
    state.token_buffer = tokens
    return state


def conditions_of(
    state: MaskedLatentState,
    model: MaskedLatentModel,
    positions: torch.LongTensor,
    decided: torch.BoolTensor,
    count: int,
    **options,
) -> torch.Tensor:
    """Conditioning vectors [G, B, Q, C] of the head of `model` for `positions` [B, Q], given the `decided` [B, N]
    tokens, at most `count` per image. `options` are further ones of `MaskedLatentModel.forward`."""
    conditions = model.forward(state.tokens, decided, count, padded=state.padded, **options)
    where = positions[..., None].expand(len(conditions), -1, -1, conditions.shape[-1])
    return conditions.gather(2, where)


def write_set(
    state: MaskedLatentState, positions: torch.LongTensor, live: torch.BoolTensor, tokens: torch.FloatTensor
) -> None:
    """Decide the tokens [B, Q, D] of the next set, and advance to the set after it."""
    model = state.model
    state.invalid |= (not_finite(tokens) & live).any(1)
    places = torch.where(live, positions, model.num_tokens)
    state.token_buffer.scatter_(1, places[..., None].expand(-1, -1, model.dim), tokens)
    state.known_buffer.scatter_(1, places, True)
    state.taken += 1


def denoise(
    state: MaskedLatentState,
    model: MaskedLatentModel,
    conditions: torch.Tensor,
    positions: torch.LongTensor,
    masked: torch.LongTensor,
    diffusion_steps: int | tuple[int, ...],
    fewest: int = 1,
    take: Callable | None = None,
) -> tuple[torch.FloatTensor, list[torch.FloatTensor]]:
    """Sample the tokens [B, Q, D] at `positions` [B, Q], given their `conditions` [G, B, Q, C] and how many tokens
    `masked` [B] of each image are left for later steps, for guidance at least the `fewest`. `take` takes a denoising
    step in place of `model.denoise`. Also returns the standard deviations [B, Q, D] of the denoising steps, the last
    step first. The last step returns its mean."""
    sampling, take = state.sampling, take or model.denoise
    temperature = by_lane(sampling.temperature, 3)
    share = torch.rsub(masked.float().clamp(min=fewest), 1, alpha=1 / model.num_tokens)
    guidance = sampling.guidance_at(share)[:, None, None]
    last = sum(diffusion_steps) if isinstance(diffusion_steps, tuple) else diffusion_steps
    stds = []

    def noise(step: int) -> torch.FloatTensor:
        return normals(state.seeds, positions, torch.full_like(state.seeds, step), Purpose.DENOISE, model.dim)

    tokens = noise(last)
    for step in reversed(range(last)):
        tokens, std = take(step, tokens, conditions, guidance, diffusion_steps)
        stds.append(std)
        if step > 0:
            tokens = tokens + temperature * std * noise(step)
    state.head_calls += last
    return tokens, stds[::-1]


@dataclass(frozen=True)
class MaskedDecoding(DecodingMethod):
    """Generate sets of continuous tokens in a random order, as in MAR (https://arxiv.org/abs/2406.11838): one forward
    pass of the transformer per set, after which the denoising head samples all tokens of the set at once.

    The sampling settings give the number of passes (`num_inference_steps`; the sets grow by a cosine schedule) and of
    denoising steps. It is exact in the sense that it samples from the distribution that the model defines for these
    numbers of steps. Other numbers define other distributions, since the tokens of a set are sampled independently of
    each other.

    Attributes:
        diffusion_steps: the number of denoising steps of the first set and of the last set, interpolated linearly
            between them, as in DiSA (https://arxiv.org/abs/2505.20297): the more tokens are known, the fewer steps are
            needed. Not exact, and without a bound. None uses the number of the sampling settings for all sets.
    """

    diffusion_steps: tuple[int, int] | None = None

    needs = {"masked_latents": ()}

    def __post_init__(self):
        if self.diffusion_steps is not None:
            sentence = "give two whole numbers of at least 2, or None"
            check_several(self, "diffusion_steps", int, lambda both: len(both) == 2 and min(both) >= 2, sentence)

    @property
    def exact(self) -> bool:
        return self.diffusion_steps is None

    def start(self, model: MaskedLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> MaskedLatentState:
        """Decide the first set.

        Raises:
            ValueError: if there are more steps than tokens.
        """
        assert isinstance(sampling, LatentSampling)
        state = open_masked(model, sampling, seeds, MaskedLatentState, few_sizes=has_few_sizes(seeds))
        if self.diffusion_steps is not None:
            first, last = self.diffusion_steps
            shares = [k / max(state.num_steps - 1, 1) for k in range(state.num_steps)]
            steps = [round(first + (last - first) * share) for share in shares]
            state.sets = [replace(each, diffusion_steps=n) for each, n in zip(state.sets, steps, strict=True)]
        self.step(state)
        return state

    def step(self, state: MaskedLatentState) -> None:
        if state.over:
            return
        before, after = state.undecided
        positions, live = state.next_set(before, after)
        each = state.sets[state.taken]
        conditions = conditions_of(state, state.model, positions, state.decided, each.visible)
        tokens, _ = denoise(state, state.model, conditions, positions, after, each.diffusion_steps)
        write_set(state, positions, live, tokens)
        state.record_set(live, after)
