"""Masked decoding of continuous tokens: sets of tokens in a random order, one forward pass per set."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F

from ..contract.distribution import LatentSampling, Sampling, by_lane
from ..contract.models import MaskedLatentModel
from ..contract.noise import Purpose, normals, random_orders
from ..contract.state import LockstepState, not_finite
from ..contract.supports import DecodingMethod


# On an accelerator few steps are captured: numbers of visible tokens are rounded up to multiples of this, and sets
# have at most four sizes.
MULTIPLE = 64


@dataclass(frozen=True)
class TokenSet:
    """The tokens that a step decides in each image: how many are visible before it, how many it decides, and by how
    many denoising steps, see `LatentSampling.num_diffusion_steps`. Numbers of tokens are the largest of any image."""

    visible: int
    count: int
    diffusion_steps: int | tuple[int, ...]


@dataclass
class MaskedState(LockstepState):
    """Adds to `LockstepState`: `order` [B, N], the positions of each image, the last of which are decided first;
    `known_buffer` bool [B, N + 1], which positions are decided; `masked` int64 [K + 1, B], the number of undecided
    tokens before each step, and `schedules` [B][K + 1], the same on the host; `sets`, one `TokenSet` per step;
    `padded`, whether images may have fewer tokens than those say. `tokens` are vectors, float32 [B, N, D], zeros where
    they are not decided."""

    image_dims = {"accepted": 1, "masked": 1}
    structure = frozenset({"padded"})
    renewed = frozenset({"taken", "schedules", "sets"})

    model: MaskedLatentModel
    sampling: LatentSampling
    order: torch.LongTensor
    known_buffer: torch.BoolTensor
    masked: torch.LongTensor
    schedules: list[list[int]]
    sets: Sequence[TokenSet]
    padded: bool

    @property
    def decided(self) -> torch.BoolTensor:
        return self.known_buffer[:, : self.model.num_tokens]

    @property
    def undecided(self) -> torch.LongTensor:
        """Int64 [2, B], the number of undecided tokens before and after the next step."""
        return self.masked.gather(0, torch.stack([self.steps, self.steps + 1]).clamp(max=self.num_steps))

    @property
    def num_steps(self) -> int:
        return len(self.sets)

    @property
    def step_shape(self) -> Hashable:
        return None if self.over else self.sets[self.taken]


_State = TypeVar("_State", bound=MaskedState)


def masked_counts(tokens: int, steps: int) -> list[int]:
    """The number of undecided tokens before each step and after the last one, by a cosine schedule. Each step decides
    at least one token, so there may not be more steps than tokens."""
    counts, steps = [tokens], min(steps, tokens)
    for step in range(1, steps):
        cosine = math.floor(tokens * math.cos(math.pi / 2 * step / steps))
        counts.append(max(1, min(counts[-1] - 1, cosine)))
    return [*counts, 0]


def rounded_up(number: int, multiple: int, most: int) -> int:
    return min(-(-number // multiple) * multiple, most)


def has_few_shapes(seeds: torch.LongTensor) -> bool:
    """Whether steps may be captured, so that sets should have few sizes."""
    return seeds.device.type != "cpu"


def few(numbers: Sequence[int]) -> list[int]:
    """Numbers of at most four sizes that are at least `numbers`."""
    return [rounded_up(number, -(-max(numbers) // 4) or 1, max(numbers)) for number in numbers]


def open_masked(
    model: MaskedLatentModel,
    sampling: LatentSampling,
    seeds: torch.LongTensor,
    state_class: type[_State],
    *,
    few_shapes: bool = False,
) -> _State:
    """A state in which only the given tokens are decided. With `few_shapes`, sets are padded to few sizes.

    Raises:
        ValueError: if there are more steps than tokens.
    """
    size, steps = model.num_tokens, sampling.num_inference_steps
    if steps > size:
        raise ValueError(f"num_inference_steps is {steps}: give at most {size}, as many as an image has tokens")
    order, unknown = random_orders(seeds, size), [size] * len(seeds)
    given = torch.zeros_like(order, dtype=torch.bool)
    tokens = torch.zeros(len(seeds), size + 1, model.dim, device=seeds.device, dtype=torch.float32)
    if sampling.forced is not None:
        given = ~sampling.forced.isnan().any(-1)
        tokens[:, :size] = torch.where(given[..., None], sampling.forced, 0)
        # Known tokens count as decided first.
        order = order.gather(1, given.gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
        unknown = (~given).sum(1).tolist()
    schedules = [masked_counts(count, steps) for count in unknown]
    length = max(2, *map(len, schedules))
    schedules = [row + [0] * (length - len(row)) for row in schedules]
    visible = [size - min(row[k] for row in schedules) for k in range(length - 1)]
    counts = [max(row[k] - row[k + 1] for row in schedules) for k in range(length - 1)]
    if few_shapes:
        visible = [rounded_up(n, MULTIPLE, size) for n in visible]
        counts = few(counts)
    steps = sampling.num_diffusion_steps
    state = state_class.open(
        model,
        sampling,
        seeds,
        None,
        order=order,
        known_buffer=F.pad(given, (0, 1)),
        masked=torch.tensor(schedules, device=seeds.device).T.contiguous(),
        schedules=schedules,
        sets=[TokenSet(*numbers, steps) for numbers in zip(visible, counts, strict=True)],
        padded=few_shapes or sampling.forced is not None,
    )
    state.token_buffer = tokens
    return state


def next_set(
    state: MaskedState, before: torch.LongTensor, after: torch.LongTensor
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """The positions [B, Q] of the next set, and which of them belong to the set of their image, with `before` [B]
    undecided tokens before it and `after` [B] after it."""
    ranks = after[:, None] + torch.arange(state.sets[state.taken].count, device=state.model.device)
    positions = state.order.gather(1, ranks.clamp(max=state.model.num_tokens - 1))
    return positions, ranks < before[:, None]


def conditions_of(
    state: MaskedState,
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
    state: MaskedState, positions: torch.LongTensor, live: torch.BoolTensor, tokens: torch.FloatTensor
) -> None:
    """Decide the tokens [B, Q, D] of the next set, and advance to the set after it."""
    model = state.model
    state.invalid |= (not_finite(tokens) & live).any(1)
    places = torch.where(live, positions, model.num_tokens)
    state.token_buffer.scatter_(1, places[..., None].expand(-1, -1, model.dim), tokens)
    state.known_buffer.scatter_(1, places, True)
    state.taken += 1


def denoise(
    state: MaskedState,
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
        return normals(state.seeds, positions, Purpose.DENOISE, torch.full_like(state.seeds, step), model.dim)

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

    Raises:
        ValueError: if a setting is not among these.
    """

    diffusion_steps: tuple[int, int] | None = None

    needs = {"masked_latents": ()}

    def __post_init__(self):
        steps = self.diffusion_steps
        if steps is None:
            return
        whole = isinstance(steps, list | tuple) and all(type(count) is int and count >= 2 for count in steps)
        if not whole or len(steps) != 2:
            raise ValueError(f"diffusion_steps is {steps!r}: give two whole numbers of at least 2, or None")
        # JSON has lists only.
        object.__setattr__(self, "diffusion_steps", tuple(steps))

    @property
    def exact(self) -> bool:
        return self.diffusion_steps is None

    def start(self, model: MaskedLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> MaskedState:
        """Decide the first set.

        Raises:
            ValueError: if there are more steps than tokens.
        """
        assert isinstance(sampling, LatentSampling)
        state = open_masked(model, sampling, seeds, MaskedState, few_shapes=has_few_shapes(seeds))
        if self.diffusion_steps is not None:
            first, last = self.diffusion_steps
            shares = [k / max(state.num_steps - 1, 1) for k in range(state.num_steps)]
            steps = [round(first + (last - first) * share) for share in shares]
            state.sets = [replace(each, diffusion_steps=n) for each, n in zip(state.sets, steps, strict=True)]
        self.step(state)
        return state

    def step(self, state: MaskedState) -> None:
        if state.over:
            return
        before, after = state.undecided
        positions, live = next_set(state, before, after)
        each = state.sets[state.taken]
        conditions = conditions_of(state, state.model, positions, state.decided, each.visible)
        tokens, _ = denoise(state, state.model, conditions, positions, after, each.diffusion_steps)
        write_set(state, positions, live, tokens)
        state.record(live.sum(1))
        torch.eq(after, 0, out=state.finished)
