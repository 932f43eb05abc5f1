"""Parallel Jacobi decoding: a window of drafts in every open row, verified side by side."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from ..kernels.coupling import couple, sample
from .distribution import Sampling
from .interface import TokenModel
from .noise import Purpose, uniforms
from .rows import RowState, decide, forward_rows, row_lanes, start_rows
from .settings import check_settings
from .window import uniform_probabilities, write_tokens


Refresh = Literal["independent", "coupled"]


@dataclass
class ParallelJacobiState(RowState):
    """Adds to `RowState`: `draft_probabilities` [B, L, W, V], the laws of the drafts after the codes decided in each open row."""

    draft_probabilities: torch.FloatTensor = None


@dataclass(frozen=True)
class ParallelJacobiDecoding:
    """Parallel Jacobi decoding (https://arxiv.org/abs/2606.05703): speculative Jacobi decoding in several rows at once.

    A row begins once the row above holds `context` codes. A pass evaluates up to `window` drafts in each open row, none
    past the codes decided in the row above; a draft sees the decided codes before it and the drafts before it in its own
    row. In each row the leading drafts that survive are decided, and the first that does not is replaced by a draw from
    the residual law and decided too (the paper does so in the top row alone, and draws anew in the others).

    So a code follows the model's law given the codes before it that are decided when it is verified: codes further right
    in the row above may be missing, and a row that begins early does so without the code before it. The images follow the
    model's own law if no code depends on those, and nothing bounds how far off they are if one does: on a random table over
    2 x 3 codes of 2 kinds, with a window of 3, the total variation is 0.19 with a context of 1 and 0.05 with 2. A context
    that covers the row is exact: speculative Jacobi decoding row by row.

    Attributes:
        window: drafts a row, >= 1.
        context: codes of the row above that a row waits for, >= 1.
        refresh: how the drafts that were not decided are drawn anew: "independent" of the old ones as in the paper, or
            "coupled" to them, so that as many as possible stay.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 16
    context: int = 8
    refresh: Refresh = "coupled"

    exact: ClassVar[bool] = False

    def __post_init__(self):
        check_settings(self, {"window": 1, "context": 1}, {"refresh": get_args(Refresh)})

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> ParallelJacobiState:
        state = ParallelJacobiState(**vars(start_rows(model, sampling, seeds, self._context(model))))
        window = min(self.window, model.layout.columns)
        state.draft_probabilities = torch.zeros(len(seeds), state.lanes, window, model.vocab_size, device=model.device)
        _fill(state, torch.full_like(seeds, state.lanes), seeds.new_zeros(len(seeds), state.lanes))
        return state

    def step(self, state: ParallelJacobiState) -> ParallelJacobiState:
        window = state.draft_probabilities.shape[2]
        run = forward_rows(state, window, self._context(state.model))
        at, passes = run.positions.flatten(1), state.forward_passes
        drafts = state.tokens.gather(1, at).view_as(run.positions)
        noise = uniforms(state.seeds, at, Purpose.VERIFY, passes, 2).unflatten(1, run.positions.shape[1:])
        verified, kept = couple(run.law, state.draft_probabilities, drafts, noise)
        leading = (kept & run.live).long().cumprod(2).sum(2)
        accepted = torch.minimum(leading + 1, run.live.sum(2))
        redrawn = verified
        if self.refresh == "independent":
            redrawn = sample(run.law, uniforms(state.seeds, at, Purpose.REFRESH, passes, 1).view_as(run.positions))
        offsets = torch.arange(window, device=at.device)
        state.draft_probabilities = torch.where(run.live[..., None], run.law, state.draft_probabilities)
        top = state.top
        decide(state, run, torch.where(offsets < accepted[..., None], verified, redrawn), accepted)
        _fill(state, state.top - top, accepted)
        return state

    def _context(self, model: TokenModel) -> int:
        return min(self.context, model.layout.columns)


def _fill(state: ParallelJacobiState, closed: torch.LongTensor, accepted: torch.LongTensor) -> None:
    """Move the draft laws on after `closed` [B] rows gave up their lanes and those in the lanes gained `accepted` [B, L]
    codes, and draft what enters the windows."""
    lanes, window, vocab_size = state.draft_probabilities.shape[1:]
    row, _, count = row_lanes(state)
    offsets = torch.arange(window, device=row.device)
    old_lane = torch.arange(lanes, device=row.device) + closed[:, None]
    old_offset = offsets + accepted.gather(1, old_lane.clamp(max=lanes - 1))[..., None]
    fresh = (old_lane >= lanes)[..., None] | (old_offset >= window)
    old = old_lane.clamp(max=lanes - 1)[..., None] * window + old_offset.clamp(max=window - 1)
    law = state.draft_probabilities.flatten(1, 2).gather(1, old.flatten(1)[..., None].expand(-1, -1, vocab_size))

    rows, columns = state.model.layout.shape
    places = count[..., None] + offsets
    inside = (row < rows)[..., None] & (places < columns)
    positions = (row[..., None] * columns + places).clamp(max=state.model.num_tokens - 1).flatten(1)
    fresh = fresh.flatten(1)
    fresh_law = uniform_probabilities(state, positions)
    state.draft_probabilities = torch.where(fresh[..., None], fresh_law, law).view_as(state.draft_probabilities)
    noise = uniforms(state.seeds, positions, Purpose.START, state.forward_passes, 1)
    drafts = sample(fresh_law, noise[..., 0])
    write_tokens(state, positions, fresh & inside.flatten(1), drafts)
