"""ReCAP: masked decoding in which some forward passes evaluate few tokens, and reuse all others."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ..contract.distribution import LatentSampling, Sampling
from ..contract.models import MaskedLatentModel
from ..contract.settings import check_settings
from ..contract.supports import DecodingMethod
from .masked import (
    MaskedState,
    TokenSet,
    conditions_of,
    denoise,
    few,
    has_few_shapes,
    next_set,
    open_masked,
    write_set,
)


@dataclass(frozen=True)
class GroupSet(TokenSet):
    """A `TokenSet` of a step that may belong to a group.

    Attributes:
        group: the number of tokens that the group decides; 0 for a step alone.
        known: how many of them are decided before this step; 0 for a full step.
    """

    group: int = 0
    known: int = 0


@dataclass
class GroupState(MaskedState):
    """Adds to `MaskedState`: `bounds` int64 [2, K + 1, B], the number of undecided tokens before and after the group
    of each step. `cache` is the context of the model, None without groups of several steps."""

    image_dims = {**MaskedState.image_dims, "bounds": 2}

    sets: Sequence[GroupSet]
    bounds: torch.LongTensor = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType] set at once


@dataclass(frozen=True)
class ReCAP(DecodingMethod):
    """Generate continuous tokens as `MaskedDecoding` does, but with cheaper forward passes
    (https://arxiv.org/abs/2505.19089). Not exact, and without a bound.

    After `full_steps` ordinary steps come groups of one full step and up to `partial_steps` partial ones. A full step
    keeps the keys and values of all layers. A partial step evaluates only the tokens that its group decides; the keys
    and values of all other places, masked or not, are those of the full step. So the places outside of a group do not
    see what the group has decided before. The random order of an image says which tokens belong to a group; within a
    group they are decided in raster order, as in the authors' code.

    Example: in a model of three tokens, the last one depends on the second with a slope of 1.8, but of 1.4 if both are
    in one group: the place of the first token has not seen the second (`tests/decoding/continuous/test_reuse.py`).

    With `full_steps` as many as there are steps the images are those of `MaskedDecoding`, except that linear guidance
    is at its full scale in the last step.

    Attributes:
        steps: all steps, full and partial, at most as many as an image has tokens; None takes `num_inference_steps` of
            the sampling settings.
        full_steps: the ordinary steps at the beginning; None takes half of all steps.
        partial_steps: partial steps per group, >= 1.
        denoising_steps: the denoising steps of a token in a full step; None takes `num_diffusion_steps` of the
            sampling settings, which says what several numbers mean.
        partial_denoising_steps: those in a partial step; None takes half of `denoising_steps`.
        keep_buffers: whether partial steps also reuse what the full step kept of the tokens that carry the class,
            which makes them cheaper. The authors' images are made without.

    Raises:
        ValueError: if a setting is not among these.
    """

    steps: int | None = None
    full_steps: int | None = None
    partial_steps: int = 1
    denoising_steps: int | tuple[int, ...] | None = None
    partial_denoising_steps: int | tuple[int, ...] | None = None
    keep_buffers: bool = False

    exact = False
    needs = {"masked_latents": ()}

    def __post_init__(self):
        check_settings(
            self, {"steps": 1, "full_steps": 0, "partial_steps": 1}, choices={"keep_buffers": (False, True)}
        )
        if self.steps is not None and self.full_steps is not None and self.full_steps > self.steps:
            raise ValueError(f"full_steps is {self.full_steps}: give at most {self.steps}, the number of all steps")
        for name in ("denoising_steps", "partial_denoising_steps"):
            steps = getattr(self, name)
            if steps is None:
                continue
            parts = tuple(steps) if isinstance(steps, list | tuple) else (steps,)
            if not all(type(part) is int and part >= 1 for part in parts) or sum(parts) < 2:
                raise ValueError(f"{name} is {steps!r}: give a whole number of at least 2, several, or None")
            # JSON has lists only.
            object.__setattr__(self, name, parts if len(parts) > 1 else sum(parts))

    def misfit(self, model: MaskedLatentModel) -> str | None:
        if self.steps is not None and self.steps > model.num_tokens:
            return f"steps is {self.steps}, and its images have {model.num_tokens} tokens"
        return None

    def start(self, model: MaskedLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> GroupState:
        """Decide the first set.

        Raises:
            ValueError: if there are more steps than tokens, or more ordinary steps than steps.
        """
        assert isinstance(sampling, LatentSampling)
        sampling = sampling.replaced(
            num_inference_steps=self.steps or sampling.num_inference_steps,
            num_diffusion_steps=self.denoising_steps or sampling.num_diffusion_steps,
        )
        steps, fewer = sampling.num_inference_steps, self.partial_denoising_steps
        if fewer is None:
            fewer = halved(sampling.num_diffusion_steps)
        full = steps // 2 if self.full_steps is None else self.full_steps
        if full > steps:
            raise ValueError(f"full_steps is {full}: give at most {steps}, the number of all steps")
        few_shapes = has_few_shapes(seeds)
        state = open_masked(model, sampling, seeds, GroupState, few_shapes=few_shapes)
        group_steps(state, groups_of(state.num_steps, full, self.partial_steps), fewer, few_shapes)
        if any(each.known for each in state.sets):
            state.cache = model.open_context(len(seeds))
        self.step(state)
        return state

    def step(self, state: GroupState) -> None:
        if state.over:
            return
        before, after = state.undecided
        positions, live = next_set(state, before, after)
        each = state.sets[state.taken]
        if each.known:
            conditions = self._partial(state, each, before, after)
        else:
            options = {"context": state.cache} if each.group else {}
            conditions = conditions_of(state, state.model, positions, state.decided, each.visible, **options)
        tokens, _ = denoise(state, state.model, conditions, positions, after, each.diffusion_steps, fewest=0)
        write_set(state, positions, live, tokens)
        state.record(live.sum(1))
        torch.eq(after, 0, out=state.finished)

    def _partial(
        self, state: GroupState, each: GroupSet, before: torch.LongTensor, after: torch.LongTensor
    ) -> torch.Tensor:
        """The conditions [G, B, Q, C] of the next set from a forward pass over the tokens of its group."""
        model, device = state.model, state.seeds.device
        at = state.steps.clamp(max=state.num_steps).expand(2, 1, -1)
        opened, closed = state.bounds.gather(1, at).squeeze(1)
        # The last of the undecided ones are decided first.
        ranks = opened[:, None] - 1 - torch.arange(each.group, device=device)
        places = state.order.gather(1, ranks.clamp(min=0))
        places = torch.where(ranks >= closed[:, None], places, model.num_tokens)
        conditions = model.forward_places(
            state.tokens,
            state.decided,
            each.visible,
            places,
            each.known,
            state.cache,
            padded=state.padded,
            keep_buffers=self.keep_buffers,
        )
        where = opened[:, None] - 1 - after[:, None] - torch.arange(each.count, device=device)
        where = where.clamp(0, each.group - 1)[..., None].expand(len(conditions), -1, -1, conditions.shape[-1])
        return conditions.gather(2, where)


def halved(steps: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Half as many denoising steps, at least two in all."""
    if isinstance(steps, tuple):
        return tuple(max(part // 2, 1) for part in steps)
    return max(steps // 2, 2)


def groups_of(steps: int, full: int, partial: int) -> list[range]:
    """The steps of each group: alone the first `full` ones, and then one with `partial` more."""
    starts = [*range(min(full, steps)), *range(full, steps, 1 + partial), steps]
    return [range(first, end) for first, end in pairwise(starts)]


def group_steps(
    state: GroupState, groups: list[range], partial_steps: int | tuple[int, ...], few_shapes: bool
) -> None:
    """Let the steps of a new state belong to `groups`, in which partial steps take so many denoising steps."""
    schedules, device = state.schedules, state.seeds.device

    def most(first: int, end: int) -> int:
        """The largest number of tokens that the steps from `first` to `end` decide in an image."""
        return max(row[first] - row[end] for row in schedules)

    of_step = [group for group in groups for _ in group]
    sizes = [most(group.start, group.stop) if len(group) > 1 else 0 for group in of_step]
    known = [most(group.start, step) for step, group in enumerate(of_step)]
    if few_shapes:
        sizes, known = few(sizes), few(known)
    state.sets = [
        GroupSet(each.visible, each.count, partial_steps if has else each.diffusion_steps, size, min(has, size))
        for each, size, has in zip(state.sets, sizes, known, strict=True)
    ]
    ends = torch.tensor(
        [[group.start, group.stop] for group in [*of_step, range(len(of_step), len(of_step))]], device=device
    )
    state.bounds = state.masked[ends.T]
    # The order within a group of several steps is that of the raster.
    size, ranks = state.model.num_tokens, torch.arange(state.model.num_tokens, device=device)
    starts = torch.tensor([group.start for group in groups], device=device)
    number = (ranks < state.masked[starts][..., None]).sum(0) - 1
    several = torch.tensor([len(group) > 1 for group in groups], device=device)[number.clamp(min=0)]
    place = torch.where(several, state.order, size - 1 - ranks)
    state.order = state.order.gather(1, (number * size + place).argsort(dim=1, descending=True))
