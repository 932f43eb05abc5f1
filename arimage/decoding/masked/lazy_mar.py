"""LazyMAR: masked decoding in which most forward passes evaluate only the rows that have changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..contract.distribution import LatentSampling, Sampling
from ..contract.models import MaskedLatentModel
from ..contract.settings import check_settings, check_several
from ..contract.supports import DecodingMethod
from .latents import LatentSet, MaskedLatentState, conditions_of, denoise, open_masked, write_set
from .sets import MULTIPLE, few, has_few_sizes, rounded_up


# The published shares of rows, by the number of the step.
FRACTIONS = (1.0,) * 20 + (0.6,) + (0.5,) * 4 + (0.4,) * 5 + (0.15,) * 5 + (0.12,) * 5 + (0.05,) * 24


@dataclass(frozen=True)
class LazySet(LatentSet):
    """A `LatentSet` of a step that may be lazy.

    Attributes:
        new: the number of tokens that the step before decided; 0 for a refresh.
        rows: the number of rows that the last layers evaluate.
    """

    new: int = 0
    rows: int = 0


@dataclass
class LazyState(MaskedLatentState):
    """Adds to `MaskedLatentState`: `rows` int64 [K + 1, B], how many rows the last layers evaluate in each step.
    `cache` is the context of the model, None if no step is lazy."""

    image_dims = {**MaskedLatentState.image_dims, "rows": 1}

    sets: Sequence[LazySet]
    rows: torch.LongTensor = field(default=None, kw_only=True)  # pyright: ignore[reportAssignmentType] set at once


@dataclass(frozen=True)
class LazyMAR(DecodingMethod):
    """Generate continuous tokens as `MaskedDecoding` does, but with cheaper forward passes
    (https://arxiv.org/abs/2503.12450). Not exact, and without a bound.

    The first steps are refreshes, ordinary forward passes, and later every few steps are. All others are lazy: they
    encode only the tokens that the step before decided. The last layers of the decoder evaluate only the rows of new
    tokens, those of the tokens to decide, and those that have changed most. Under guidance a lazy step evaluates only
    the branch with the condition; the other one is as far from it as in the last refresh. The head reuses the outputs
    of its blocks in the same way, in all steps. Sets, orders, noise and guidance are those of `MaskedDecoding`. The
    defaults are the authors' settings for 64 steps. With `every` and `head_every` 1 the images are those of
    `MaskedDecoding`.

    Attributes:
        first: refreshes at the beginning, >= 1.
        every: then every so many steps one is a refresh, the next one first.
        layer: the layer of the decoder after whose attention rows are chosen.
        extra: at least so many rows are evaluated besides those of new tokens and of the tokens to decide.
        head_every: every so many denoising steps, and in the first one of a token, the whole head is evaluated.
        fractions: at least this share of all rows is evaluated, one number for each step. None takes the published 64.
    """

    first: int = 5
    every: int = 9
    layer: int = 3
    extra: int = 15
    head_every: int = 7
    fractions: tuple[float, ...] | None = None

    exact = False
    needs = {"masked_latents": ()}

    def __post_init__(self):
        check_settings(self, {"first": 1, "every": 1, "layer": 0, "extra": 0, "head_every": 1})
        if self.fractions is not None:
            sentence = "give numbers from 0 to 1, one for each step"
            check_several(
                self,
                "fractions",
                float,
                lambda shares: shares != () and all(0 <= one <= 1 for one in shares),
                sentence,
            )

    def misfit(self, model: MaskedLatentModel) -> str | None:
        if self.layer >= model.num_layers:
            return f"layer is {self.layer}, and its decoder has {model.num_layers} layers, the first of which is 0"
        return None

    def is_refresh(self, step: int) -> bool:
        return step < self.first or (step - self.first) % self.every == 0

    def start(self, model: MaskedLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> LazyState:
        """Decide the first set.

        Raises:
            ValueError: if there are more steps than tokens, or than `fractions`.
        """
        assert isinstance(sampling, LatentSampling)
        fractions, steps = self.fractions or FRACTIONS, sampling.num_inference_steps
        if steps > len(fractions):
            raise ValueError(
                f"num_inference_steps is {steps}, and fractions has {len(fractions)} numbers: give at most as many "
                "steps, or LazyMAR more fractions"
            )
        few_sizes = has_few_sizes(seeds)
        state = open_masked(model, sampling, seeds, LazyState, few_sizes=few_sizes)
        self._plan(state, fractions, few_sizes)
        if any(each.new for each in state.sets):
            state.cache = model.open_context(len(seeds), lazy=True)
        self.step(state)
        return state

    def _plan(self, state: LazyState, fractions: Sequence[float], few_sizes: bool) -> None:
        """Choose which steps of a new state are lazy, and how many rows they evaluate."""
        width = state.model.num_rows
        lazy = [not self.is_refresh(step) for step in range(state.num_steps)]
        # How many tokens each step of an image decides.
        counts = [[a - b for a, b in zip(row, row[1:], strict=False)] for row in state.schedules]
        rows = [
            [
                min(max(own[step] + own[step - 1] + self.extra, int(width * fractions[step])), width) if is_lazy else 0
                for step, is_lazy in enumerate(lazy)
            ]
            for own in counts
        ]
        new = [is_lazy * max(own[step - 1] for own in counts) for step, is_lazy in enumerate(lazy)]
        most = [max(numbers) for numbers in zip(*rows, strict=True)]
        if few_sizes:
            new, most = few(new), [rounded_up(number, MULTIPLE, width) for number in most]
        state.sets = [
            LazySet(**vars(each), new=new, rows=rows) for each, new, rows in zip(state.sets, new, most, strict=True)
        ]
        state.rows = torch.tensor([[*own, 0] for own in rows], device=state.seeds.device).T.contiguous()

    def step(self, state: LazyState) -> None:
        if state.over:
            return
        before, after = state.undecided
        positions, live = state.next_set(before, after)
        each = state.sets[state.taken]
        if each.new:
            conditions = self._lazy(state, each, positions, live)
        else:
            options = {} if state.cache is None else {"context": state.cache}
            conditions = conditions_of(state, state.model, positions, state.decided, each.visible, **options)
        tokens, _ = self._denoise(state, conditions, positions, after, each.diffusion_steps)
        write_set(state, positions, live, tokens)
        state.record_set(live, after)

    def _lazy(
        self, state: LazyState, each: LazySet, positions: torch.LongTensor, live: torch.BoolTensor
    ) -> torch.Tensor:
        """The conditions [G, B, Q, C] of the next set from a lazy forward pass."""
        model, nowhere = state.model, state.model.num_tokens
        at = torch.stack([state.steps, state.steps - 1]).clamp(max=state.num_steps)
        before, earlier = state.masked.gather(0, at)
        ranks = before[:, None] + torch.arange(each.new, device=state.seeds.device)
        new = state.order.gather(1, ranks.clamp(max=nowhere - 1))
        return model.forward_lazily(
            state.tokens,
            state.decided,
            each.visible,
            torch.where(ranks < earlier[:, None], new, nowhere),
            torch.where(live, positions, nowhere),
            state.cache,
            layer=self.layer,
            rows=state.rows.gather(0, at[:1])[0],
            most=each.rows,
            padded=state.padded,
        )

    def _denoise(self, state, conditions, positions, masked, diffusion_steps):
        """As `denoise`, with the head evaluated as a whole in some steps."""
        steps, kept = sum(diffusion_steps) if isinstance(diffusion_steps, tuple) else diffusion_steps, {}

        def take(step: int, *arguments):
            whole = step == steps - 1 or step % self.head_every == 0
            return state.model.denoise_lazily(step, *arguments, kept, whole=whole, fresh=10 * step > 9 * steps)

        return denoise(state, state.model, conditions, positions, masked, diffusion_steps, take=take)
