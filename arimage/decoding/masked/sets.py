"""What masked decodings share: sets of places that are decided one after another, in an order of each image."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import torch

from ..contract.distribution import Sampling
from ..contract.models import MaskedLatentModel, MaskedTokenModel
from ..contract.state import LockstepState


# On an accelerator few steps are captured: numbers of places are rounded up to multiples of this, and sets have at
# most four sizes.
MULTIPLE = 64


@dataclass(frozen=True)
class TokenSet:
    """The tokens that a step decides in each image. Numbers of tokens are the largest of any image.

    Attributes:
        count: how many it decides.
        group: how many tokens the group of steps decides to which this step belongs; 0 for a step alone.
        known: how many of them are decided before this step; 0 for a full step.
    """

    count: int
    group: int = 0
    known: int = 0


@dataclass
class MaskedState(LockstepState):
    """Adds to `LockstepState`: `order` [B, N], the places of each image, the last of which are decided first; `masked`
    int64 [K + 1, B], the number of undecided tokens before each step, and `schedules` [B][K + 1], the same on the
    host; `sets`, one `TokenSet` per step; `padded`, whether images may have fewer tokens than those say."""

    image_dims = {"accepted": 1, "masked": 1}
    structure = frozenset({"padded"})
    renewed = frozenset({"taken", "schedules", "sets"})

    model: MaskedLatentModel | MaskedTokenModel
    order: torch.LongTensor
    masked: torch.LongTensor
    schedules: list[list[int]]
    sets: Sequence[TokenSet]
    padded: bool

    @property
    def undecided(self) -> torch.LongTensor:
        """Int64 [2, B], the number of undecided tokens before and after the next step."""
        return self.masked.gather(0, torch.stack([self.steps, self.steps + 1]).clamp(max=self.num_steps))

    @property
    def newest(self) -> torch.BoolTensor:
        after, decided = (~self.decided).sum(1), self.accepted.gather(0, self.steps[None] - 1)[0]
        ranks = torch.arange(self.model.num_tokens, device=self.seeds.device)
        newest = (ranks >= after[:, None]) & (ranks < (after + decided)[:, None])
        return torch.zeros_like(newest).scatter(1, self.order, newest)

    @property
    def num_steps(self) -> int:
        return len(self.sets)

    @property
    def step_variant(self) -> Hashable:
        return None if self.over else self.sets[self.taken]

    def next_set(self, before: torch.LongTensor, after: torch.LongTensor) -> tuple[torch.LongTensor, torch.BoolTensor]:
        """The places [B, Q] of the next set, and which of them belong to the set of their image, with `before` [B]
        undecided tokens before it and `after` [B] after it."""
        ranks = after[:, None] + torch.arange(self.sets[self.taken].count, device=self.seeds.device)
        return self.order.gather(1, ranks.clamp(max=self.model.num_tokens - 1)), ranks < before[:, None]

    def record_set(self, live: torch.BoolTensor, after: torch.LongTensor) -> None:
        """Count a step that decided the places that are `live` [B, Q], and left `after` [B] undecided."""
        self.record(live.sum(1))
        torch.eq(after, 0, out=self.finished)


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


def has_few_sizes(seeds: torch.LongTensor) -> bool:
    """Whether steps may be captured, so that sets should have few sizes."""
    return seeds.device.type != "cpu"


def few(numbers: Sequence[int]) -> list[int]:
    """Numbers of at most four sizes that are at least `numbers`."""
    return [rounded_up(number, -(-max(numbers) // 4) or 1, max(numbers)) for number in numbers]


def open_sets(
    model: MaskedLatentModel | MaskedTokenModel,
    sampling: Sampling,
    seeds: torch.LongTensor,
    state_class: type[_State],
    order: torch.LongTensor,
    given: torch.BoolTensor | None,
    counts: Callable[[int], list[int]],
    *,
    few_sizes: bool,
    **buffers,
) -> _State:
    """A state in which only the `given` [B, N] places are decided.

    Args:
        order: the places of each image [B, N], the last of which are decided first.
        counts: the number of undecided tokens before each step and after the last one, of so many.
        few_sizes: whether sets are padded to few sizes.
        buffers: the fields that `state_class` adds.
    """
    unknown = [model.num_tokens] * len(seeds)
    if given is not None:
        # Given tokens count as decided first.
        order = order.gather(1, given.gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
        unknown = (~given).sum(1).tolist()
    schedules = [counts(count) for count in unknown]
    length = max(2, *map(len, schedules))
    schedules = [row + [0] * (length - len(row)) for row in schedules]
    sizes = [max(row[k] - row[k + 1] for row in schedules) for k in range(length - 1)]
    return state_class.open(
        model,
        sampling,
        seeds,
        None,
        order=order,
        masked=torch.tensor(schedules, device=seeds.device).T.contiguous(),
        schedules=schedules,
        sets=[TokenSet(size) for size in (few(sizes) if few_sizes else sizes)],
        padded=few_sizes or given is not None,
        **buffers,
    )


# Groups of steps


@dataclass
class GroupState(MaskedState):
    """Adds to `MaskedState`: `bounds` int64 [2, K + 1, B], the number of undecided tokens before and after the group
    of each step. `cache` is the context of the model, None without groups of several steps."""

    image_dims = {**MaskedState.image_dims, "bounds": 2}

    bounds: torch.LongTensor = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType] set at once

    def group_places(self) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
        """The places [B, M] that the group of the next step decides, in the order in which they are decided, N where
        an image has fewer; and the numbers [B] of undecided tokens before and after the group."""
        at = self.steps.clamp(max=self.num_steps).expand(2, 1, -1)
        opened, closed = self.bounds.gather(1, at).squeeze(1)
        ranks = opened[:, None] - 1 - torch.arange(self.sets[self.taken].group, device=self.seeds.device)
        places = self.order.gather(1, ranks.clamp(min=0))
        return torch.where(ranks >= closed[:, None], places, self.model.num_tokens), opened, closed


def groups_of(steps: int, full: int, partial: int) -> list[range]:
    """The steps of each group: alone the first `full` ones, and then one with `partial` more."""
    starts = [*range(min(full, steps)), *range(full, steps, 1 + partial), steps]
    return [range(first, end) for first, end in pairwise(starts)]


def group_steps(state: GroupState, groups: list[range], *, few_sizes: bool) -> None:
    """Let the steps of a new state belong to `groups`."""
    schedules = state.schedules

    def most(first: int, end: int) -> int:
        """The largest number of tokens that the steps from `first` to `end` decide in an image."""
        return max(row[first] - row[end] for row in schedules)

    of_step = [group for group in groups for _ in group]
    sizes = [most(group.start, group.stop) if len(group) > 1 else 0 for group in of_step]
    known = [most(group.start, step) for step, group in enumerate(of_step)]
    if few_sizes:
        sizes, known = few(sizes), few(known)
    state.sets = [
        replace(each, group=size, known=min(has, size))
        for each, size, has in zip(state.sets, sizes, known, strict=True)
    ]
    ends = torch.tensor(
        [[group.start, group.stop] for group in [*of_step, range(len(of_step), len(of_step))]],
        device=state.seeds.device,
    )
    state.bounds = state.masked[ends.T]
