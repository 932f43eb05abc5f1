"""Parallel Jacobi decoding: a window of drafts in every open row, verified in parallel."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..kernels.coupling import couple, sample
from .distribution import Sampling
from .interface import TokenModel, needs_raster
from .noise import Purpose, uniforms
from .rows import RowState, decide, default_context, forward_rows, open_rows, rows_in_flight, start_rows
from .settings import check_settings


Refresh = Literal["independent", "coupled"]


@dataclass
class ParallelJacobiState(RowState):
    """Adds to `RowState`: `draft_probabilities` [B, L, W, V], what the drafts after the decided tokens of each open row were
    sampled from."""

    draft_probabilities: torch.FloatTensor


@dataclass(frozen=True)
class ParallelJacobiDecoding:
    """Parallel Jacobi decoding (https://arxiv.org/abs/2606.05703): speculative Jacobi decoding in several rows at once.

    A row begins once the row above holds `context` tokens. A step evaluates up to `window` drafts in each open row, none past
    the decided tokens of the row above; a draft sees the decided tokens before it and the drafts before it in its own row. In
    each row the leading drafts that are accepted are decided, and the first that is not is replaced by a sample from the
    residual distribution and decided too (the paper does so in the top row only, and samples again from the model's
    distribution in the others).

    So a token follows the model's distribution given the tokens before it that are decided when it is verified: tokens further
    right in the row above may be missing, and a row that begins early does so without the token before it. The images follow
    the model's own distribution if no token depends on those, and nothing bounds how far off they are if one does: on a random
    table over 2 x 3 tokens of 2 kinds, with a window of 3, the total variation is 0.19 with a context of 1 and 0.05 with 2. A
    context that covers the row is exact: speculative Jacobi decoding row by row. The rows of a video are those of all frames.

    Attributes:
        window: drafts per row, >= 1.
        context: tokens of the row above that a row waits for, >= 1; None is a third of a row, at least 12.
        refresh: how the drafts that were not decided are sampled again: "independent" of the old ones as in the paper, or
            "coupled" to them, so that as many as possible stay.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 16
    context: int | None = None
    refresh: Refresh = "coupled"

    exact = False

    def __post_init__(self):
        check_settings(
            self,
            {"window": 1} if self.context is None else {"window": 1, "context": 1},
            {"refresh": get_args(Refresh)},
        )

    def supports(self, model: TokenModel) -> str | None:
        return needs_raster(model)

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> ParallelJacobiState:
        context = self._context(model)
        rows, window = rows_in_flight(model.layout, context), min(self.window, model.layout.columns)
        none = torch.zeros(len(seeds), rows, window, model.vocab_size, device=model.device)
        state = start_rows(ParallelJacobiState, model, sampling, seeds, context, draft_probabilities=none)
        _fill(state, torch.full_like(seeds, rows), seeds.new_zeros(len(seeds), rows))
        return state

    def step(self, state: ParallelJacobiState) -> None:
        window = state.draft_probabilities.shape[2]
        step = forward_rows(state, window, self._context(state.model))
        at, p, steps = step.positions.flatten(1), step.probabilities, state.steps
        drafts = state.tokens.gather(1, at).clamp(min=0).view_as(step.positions)
        noise = uniforms(state.seeds, at, Purpose.VERIFY, steps, 2).unflatten(1, step.positions.shape[1:])
        verified, kept = couple(p, state.draft_probabilities, drafts, noise)
        leading = (kept & step.live).long().cumprod(2).sum(2)
        accepted = torch.minimum(leading + 1, step.live.sum(2))
        redrafted = verified
        if self.refresh == "independent":
            redrafted = sample(p, uniforms(state.seeds, at, Purpose.REFRESH, steps, 1).view_as(step.positions))
        offsets = torch.arange(window, device=at.device)
        torch.where(step.live[..., None], p, state.draft_probabilities, out=state.draft_probabilities)
        top = state.top.clone()
        decide(state, step, torch.where(offsets < accepted[..., None], verified, redrafted), accepted)
        _fill(state, state.top - top, accepted)

    def _context(self, model: TokenModel) -> int:
        return min(self.context or default_context(model.layout.columns), model.layout.columns)


def _fill(state: ParallelJacobiState, closed: torch.LongTensor, accepted: torch.LongTensor) -> None:
    """Move the draft probabilities on after `closed` [B] rows were completed and the rows in flight gained `accepted` [B, L]
    tokens, and draft what enters the windows."""
    in_flight, window, vocab_size = state.draft_probabilities.shape[1:]
    layout = state.model.layout
    row, _, count = open_rows(state)
    offsets = torch.arange(window, device=row.device)
    old_row = torch.arange(in_flight, device=row.device) + closed[:, None]
    old_offset = offsets + accepted.gather(1, old_row.clamp(max=in_flight - 1))[..., None]
    fresh = ((old_row >= in_flight)[..., None] | (old_offset >= window)).flatten(1)
    old = (old_row.clamp(max=in_flight - 1)[..., None] * window + old_offset.clamp(max=window - 1)).flatten(1)
    kept = state.draft_probabilities.flatten(1, 2).gather(1, old[..., None].expand(-1, -1, vocab_size))

    places = count[..., None] + offsets
    inside = ((row < layout.rows)[..., None] & (places < layout.columns)).flatten(1)
    positions = (row[..., None] * layout.columns + places).clamp(max=state.model.num_tokens - 1).flatten(1)
    start = state.sampling.uniform(positions, vocab_size)
    drafts = sample(start, uniforms(state.seeds, positions, Purpose.START, state.steps, 1)[..., 0])
    state.draft_probabilities.copy_(torch.where(fresh[..., None], start, kept).view_as(state.draft_probabilities))
    state.write_tokens(positions, fresh & inside, drafts)
