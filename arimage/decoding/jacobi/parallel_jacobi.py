"""Parallel Jacobi decoding: a window of drafts in every open row, all verified in parallel."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ...kernels.coupling import couple_at, sample_at
from ..contract.distribution import Sampling
from ..contract.layout import Layout
from ..contract.models import TokenModel
from ..contract.noise import Purpose
from ..contract.settings import check_settings
from ..contract.supports import DecodingMethod
from ..rows import RowState, context_of, decide, forward_rows, rows_in_flight, start_rows
from .window import draft_uniformly, start_distribution


Refresh = Literal["independent", "coupled"]


@dataclass
class ParallelJacobiState(RowState):
    """Adds to `RowState`. The drafts of a row are kept in a ring: when a draft is decided, its slot moves on to the
    column W further.

    Attributes:
        column: int64 [B, L, W], the column of the draft in each slot of the rows in flight.
        draft_probabilities: float32 [B, L, W, V], the distributions that the drafts were sampled from.
        start, start_sums: float32 [B, V], the uniform distribution over the allowed tokens, and its cumulative sums.
    """

    column: torch.LongTensor
    draft_probabilities: torch.FloatTensor
    start: torch.FloatTensor
    start_sums: torch.FloatTensor


@dataclass(frozen=True)
class ParallelJacobiDecoding(DecodingMethod):
    """Parallel Jacobi decoding (https://arxiv.org/abs/2606.05703): speculative Jacobi decoding in several rows at
    once.

    A row begins once the row above it has `context` tokens. A step evaluates up to `window` drafts in each open row,
    none further right than the decided tokens of the row above. A draft attends to the decided tokens before it and to
    the drafts before it in its own row. In each row the leading accepted drafts are decided. The first rejected draft
    is replaced by a sample from the residual distribution and decided too (the paper does so in the top row only, and
    samples again from the model's distribution in the others).

    So a token follows the model's distribution given the earlier tokens that are decided when it is verified: tokens
    further right in the row above may be missing, and a row that begins early does so without the token before it. If
    no token depends on the missing ones, the images follow the model's own distribution. Otherwise there is no bound:
    on a random table of 2 x 3 tokens with a window of 3, the total variation is 0.19 with a context of 1 and 0.05 with
    2. With a context of a full row it is exact. A video has the rows of all its frames.

    Attributes:
        window: drafts per row, >= 1.
        context: the number of tokens in the row above that a row waits for, >= 1; None is a third of a row, at least
            12.
        refresh: how undecided drafts are sampled again: "independent" of the old ones as in the paper, or "coupled" to
            them, so that as many as possible stay the same.
    """

    window: int = 16
    context: int | None = None
    refresh: Refresh = "coupled"

    exact = False
    needs = {"tokens": ("single tokens", "raster", "one grid")}

    def __post_init__(self):
        check_settings(self, {"window": 1, "context": 1}, {"refresh": get_args(Refresh)})

    def positions(self, layout: Layout) -> int | None:
        return rows_in_flight(layout, context_of(layout, self.context)) * min(self.window, layout.columns)

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> ParallelJacobiState:
        context = context_of(model.layout, self.context)
        rows, window = rows_in_flight(model.layout, context), min(self.window, model.layout.columns)
        start, start_sums = start_distribution(model, sampling, len(seeds))
        column = torch.arange(window, device=model.device).repeat(len(seeds), rows, 1)
        state = start_rows(
            ParallelJacobiState,
            model,
            sampling,
            seeds,
            context,
            column=column,
            draft_probabilities=torch.zeros(*column.shape, model.vocab_size, device=model.device, dtype=torch.float32),
            start=start,
            start_sums=start_sums,
        )
        # The first token is decided.
        column[:, 0, 0] += window * (model.layout.columns > 1)
        _draft(state, torch.ones_like(column, dtype=torch.bool))
        return state

    def step(self, state: ParallelJacobiState) -> None:
        window, column, q = state.column.shape[2], state.column, state.draft_probabilities
        step = forward_rows(state, column, context_of(state.model.layout, self.context))
        at, p = step.positions.flatten(1), step.probabilities
        drafts = state.token_buffer.gather(1, at).clamp(min=0).view_as(column)
        verified, kept, _ = couple_at(p, q, drafts, state.seeds, step.positions, state.steps, Purpose.VERIFY)
        tokens = verified
        # A row is decided up to and including the first draft that is not kept, at most as far as the row above.
        last = torch.where(kept, (step.count + (window - 1))[..., None], column).amin(2)
        accepted = (torch.minimum(last + 1, step.end) - step.count).clamp(min=0)
        decided = column < (step.count + accepted)[..., None]
        if self.refresh == "independent":
            redrafted = sample_at(p.flatten(1, 2), state.seeds, at, state.steps, Purpose.REFRESH).view_as(column)
            tokens = torch.where(decided, verified, redrafted)
        torch.where(step.ended[..., None], q, p, out=q)
        closed = decide(state, step, tokens, accepted)[..., None]
        slots = torch.arange(window, device=at.device)
        torch.where(closed, slots, column.add_(decided, alpha=window), out=column)
        _draft(state, decided | closed)


def _draft(state: ParallelJacobiState, entered: torch.BoolTensor) -> None:
    """Draft where `entered` [B, L, W]."""
    columns = state.model.layout.columns
    positions = (state.row[..., None] * columns + state.column).flatten(1)
    drafts, start = draft_uniformly(state, positions)
    inside = entered & (state.column < columns)
    state.write_tokens(positions, inside.flatten(1), drafts)
    q = state.draft_probabilities.flatten(1, 2)
    torch.where(entered.flatten(1)[..., None], start, q, out=q)
