"""ReCAP: masked decoding in which some forward passes evaluate few tokens, and reuse all others."""

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..contract.distribution import LatentSampling, Sampling
from ..contract.models import MaskedLatentModel, MaskedTokenModel
from ..contract.settings import check_settings, check_several
from .confidence import ConfidenceDecoding
from .halton import HaltonDecoding, too_many_steps
from .latents import LatentSet, MaskedLatentState, conditions_of, denoise, open_masked, write_set
from .sets import GroupState, group_steps, groups_of, has_few_sizes
from .tokens import GroupTokenState, SampledDecoding


@dataclass
class GroupLatentState(GroupState, MaskedLatentState):
    """A `MaskedLatentState` whose steps may belong to groups."""


@dataclass(frozen=True)
class ReCAP(SampledDecoding):
    """Generate tokens as another masked decoding does, but with cheaper forward passes
    (https://arxiv.org/abs/2505.19089): continuous tokens as `MaskedDecoding`, others as the `sampler`. Not exact, and
    without a bound.

    After `full_steps` ordinary steps come groups of one full step and up to `partial_steps` partial ones. A full step
    keeps the keys and values of all layers. A partial step evaluates only the tokens that its group decides; the keys
    and values of all other places, masked or not, are those of the full step. So the places outside of a group do not
    see what the group has decided before.

    The tokens of a group are known before it begins: with `MaskedDecoding` and `HaltonDecoding` the next ones in the
    order of the image, with `ConfidenceDecoding` those that the full step rates highest. Continuous tokens of a group
    are decided in raster order, as in the authors' code, others as by the sampler.

    With `full_steps` as many as there are steps the images are those of the other decoding, except that linear
    guidance of continuous tokens is at its full scale in the last step.

    Attributes:
        steps: all steps, full and partial, at most as many as an image has tokens; None takes those of the sampler,
            and `num_inference_steps` of the sampling settings for continuous tokens.
        full_steps: the ordinary steps at the beginning; None takes half of all steps.
        partial_steps: partial steps per group, >= 1.
        denoising_steps: the denoising steps of a continuous token in a full step; None takes `num_diffusion_steps` of
            the sampling settings, which says what several numbers mean.
        partial_denoising_steps: those in a partial step; None takes half of `denoising_steps`.
        keep_buffers: whether partial steps also reuse what the full step kept of the rows that do not stand for a
            place, such as those that carry the class, which makes them cheaper. The authors' images are made without.
        sampler: the decoding of tokens that are not continuous.
    """

    steps: int | None = None
    full_steps: int | None = None
    partial_steps: int = 1
    denoising_steps: int | tuple[int, ...] | None = None
    partial_denoising_steps: int | tuple[int, ...] | None = None
    keep_buffers: bool = False
    sampler: HaltonDecoding | ConfidenceDecoding = field(default_factory=HaltonDecoding)

    exact = False
    needs = {"masked_latents": (), "masked_tokens": ()}

    def __post_init__(self):
        check_settings(
            self, {"steps": 1, "full_steps": 0, "partial_steps": 1}, choices={"keep_buffers": (False, True)}
        )
        if self.steps is not None and self.full_steps is not None and self.full_steps > self.steps:
            raise ValueError(f"full_steps is {self.full_steps}: give at most {self.steps}, the number of all steps")
        super().__post_init__()
        if isinstance(self.sampler, ConfidenceDecoding) and self.sampler.redraw_known:
            raise ValueError("redraw_known is true, and a partial step evaluates few tokens: leave it out for ReCAP")
        for name in ("denoising_steps", "partial_denoising_steps"):
            steps = getattr(self, name)
            if steps is None:
                continue
            sentence = "give a whole number of at least 2, several, or None"
            check_several(self, name, int, lambda parts: min(parts, default=0) >= 1 and sum(parts) >= 2, sentence)
            parts = getattr(self, name)
            object.__setattr__(self, name, parts if len(parts) > 1 else sum(parts))

    def misfit(self, model: MaskedLatentModel | MaskedTokenModel) -> str | None:
        return too_many_steps(self.steps, model) or (
            self.sampler.misfit(model) if model.kind == "masked_tokens" and self.steps is None else None
        )

    def start(
        self, model: MaskedLatentModel | MaskedTokenModel, sampling: Sampling, seeds: torch.LongTensor
    ) -> GroupLatentState | GroupTokenState:
        """Decide the first set.

        Raises:
            ValueError: if there are more steps than tokens, or more ordinary steps than steps.
        """
        if model.kind == "masked_tokens":
            state = self._sampler.open(model, sampling, seeds, GroupTokenState)
            self._group(state, self.num_steps(model))
            self._sampler.plan(state)
        else:
            assert isinstance(sampling, LatentSampling)
            sampling = sampling.replaced(
                num_inference_steps=self.steps or sampling.num_inference_steps,
                num_diffusion_steps=self.denoising_steps or sampling.num_diffusion_steps,
            )
            few_sizes = has_few_sizes(seeds)
            state = open_masked(model, sampling, seeds, GroupLatentState, few_sizes=few_sizes)
            groups = self._group(state, sampling.num_inference_steps)
            _decide_in_raster_order(state, groups)
            fewer = self.partial_denoising_steps or halved(sampling.num_diffusion_steps)
            state.sets = [replace(each, diffusion_steps=fewer) if each.known else each for each in state.sets]
        if any(each.known for each in state.sets):
            state.cache = model.open_context(len(seeds))
        self.step(state)
        return state

    def _group(self, state: GroupState, steps: int) -> list[range]:
        """Let the steps of a new state, at most `steps`, belong to groups."""
        full = steps // 2 if self.full_steps is None else self.full_steps
        if full > steps:
            raise ValueError(f"full_steps is {full}: give at most {steps}, the number of all steps")
        groups = groups_of(state.num_steps, full, self.partial_steps)
        group_steps(state, groups, few_sizes=has_few_sizes(state.seeds))
        return groups

    def step(self, state: GroupLatentState | GroupTokenState) -> None:
        if state.over:
            return
        if isinstance(state, GroupTokenState):
            self._decide_tokens(state)
        else:
            self._decide_latents(state)

    def _decide_tokens(self, state: GroupTokenState) -> None:
        model, each = state.model, state.sets[state.taken]
        if not each.known:
            context = state.cache if each.group else None
            self._sampler.decide(state, partial(model.forward, state.tokens, context=context))
            return
        rows, _, last = state.group_places()
        rows = torch.where(rows < model.num_tokens, rows, model.num_rows)
        if not self.keep_buffers:
            others = torch.arange(model.num_tokens, model.num_rows, device=rows.device)
            rows = torch.cat([rows, others.expand(len(rows), -1)], dim=1)
        self._sampler.decide(state, partial(model.forward, state.tokens, rows=rows, context=state.cache), last)

    def _decide_latents(self, state: GroupLatentState) -> None:
        before, after = state.undecided
        positions, live = state.next_set(before, after)
        each = state.sets[state.taken]
        if each.known:
            conditions = self._partial_conditions(state, each, after)
        else:
            options = {"context": state.cache} if each.group else {}
            conditions = conditions_of(state, state.model, positions, state.decided, each.visible, **options)
        tokens, _ = denoise(state, state.model, conditions, positions, after, each.diffusion_steps, fewest=0)
        write_set(state, positions, live, tokens)
        state.record_set(live, after)

    def _partial_conditions(self, state: GroupLatentState, each: LatentSet, after: torch.LongTensor) -> torch.Tensor:
        """The conditions [G, B, Q, C] of the next set from a forward pass over the tokens of its group."""
        places, opened, _ = state.group_places()
        conditions = state.model.forward_places(
            state.tokens,
            state.decided,
            each.visible,
            places,
            each.known,
            state.cache,
            padded=state.padded,
            keep_buffers=self.keep_buffers,
        )
        where = opened[:, None] - 1 - after[:, None] - torch.arange(each.count, device=after.device)
        where = where.clamp(0, each.group - 1)[..., None].expand(len(conditions), -1, -1, conditions.shape[-1])
        return conditions.gather(2, where)


def _decide_in_raster_order(state: GroupLatentState, groups: list[range]) -> None:
    """Let the tokens of each group of several steps be decided in raster order."""
    device, size = state.seeds.device, state.model.num_tokens
    ranks = torch.arange(size, device=device)
    starts = torch.tensor([group.start for group in groups], device=device)
    number = (ranks < state.masked[starts][..., None]).sum(0) - 1
    several = torch.tensor([len(group) > 1 for group in groups], device=device)[number.clamp(min=0)]
    place = torch.where(several, state.order, size - 1 - ranks)
    state.order = state.order.gather(1, (number * size + place).argsort(dim=1, descending=True))


def halved(steps: int | tuple[int, ...]) -> int | tuple[int, ...]:
    """Half as many denoising steps, at least two in all."""
    if isinstance(steps, tuple):
        return tuple(max(part // 2, 1) for part in steps)
    return max(steps // 2, 2)
