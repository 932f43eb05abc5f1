"""Parallel Jacobi decoding: a window of drafts in every open row, verified side by side."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from .coupling import couple, draw
from .interface import TokenModel
from .law import Sampling
from .noise import Purpose, uniforms
from .rows import RowState, decide, forward_rows, row_lanes, start_rows
from .window import write_tokens


Refresh = Literal["independent", "coupled"]


@dataclass
class ParallelJacobiState(RowState):
    """Adds to `RowState`: `draft_law` [B, L, W, V], the laws of the drafts after the codes decided in each open row."""

    draft_law: torch.FloatTensor = None


@dataclass(frozen=True)
class ParallelJacobiDecoding:
    """Parallel Jacobi decoding (https://arxiv.org/abs/2606.05703): speculative Jacobi decoding in several rows at once.

    A row begins once the row above holds `context` codes. A pass evaluates up to `window` drafts in each open row, none
    past the codes decided in the row above; a draft sees the decided codes before it and the drafts before it in its own
    row. In each row the leading drafts that survive are decided, and the first that does not is replaced by a draw from
    the residual law and decided too (the paper does so in the top row alone, and draws anew in the others).

    So every code follows the model's law given the codes that were decided before it in raster order when it was
    verified: those to its right in the row above may be missing. The images therefore do not follow the model's own law
    unless it looks no further than to the left, above and above left; how far off they are is the model's affair. A
    context that covers the row is exact.

    Attributes:
        window: drafts a row, >= 1.
        context: codes of the row above that a row waits for, >= 1.
        refresh: how the drafts that were not decided are drawn anew: "independent" of the old ones as in the paper, or
            "coupled" to them, so that as many as possible stay.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 16
    context: int = 6
    refresh: Refresh = "coupled"

    exact: ClassVar[bool] = False

    def __post_init__(self):
        for name in ("window", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: give a whole number of at least 1")
        if self.refresh not in get_args(Refresh):
            raise ValueError(f"refresh is {self.refresh!r}: choose among {', '.join(get_args(Refresh))}")

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> ParallelJacobiState:
        state = ParallelJacobiState(**vars(start_rows(model, sampling, seeds, self._context(model))))
        window = min(self.window, model.grid[1])
        state.draft_law = torch.zeros(len(seeds), state.lanes, window, model.vocab_size, device=model.device)
        _fill(
            state, torch.full_like(seeds, state.lanes), torch.zeros_like(state.draft_law[..., 0, 0], dtype=torch.long)
        )
        return state

    def step(self, state: ParallelJacobiState) -> ParallelJacobiState:
        lanes_and_window = state.draft_law.shape[1:3]
        run = forward_rows(state, lanes_and_window[1], self._context(state.model))
        at = run.positions.flatten(1)
        drafts = state.tokens.gather(1, at).unflatten(1, lanes_and_window)
        passes = state.forward_passes
        noise = uniforms(state.seeds, at, Purpose.VERIFY, passes, 2).unflatten(1, lanes_and_window)
        verified, kept = couple(run.law, state.draft_law, drafts, noise)
        leading = (kept & run.live).long().cumprod(2).sum(2)
        accepted = torch.minimum(leading + 1, run.live.sum(2))
        redrawn = verified
        if self.refresh == "independent":
            noise = uniforms(state.seeds, at, Purpose.REFRESH, passes, 1).unflatten(1, lanes_and_window)
            redrawn = draw(run.law, noise[..., 0])
        offsets = torch.arange(lanes_and_window[1], device=at.device)
        state.draft_law = torch.where(run.live[..., None], run.law, state.draft_law)
        top = state.top
        decide(state, run, torch.where(offsets < accepted[..., None], verified, redrawn), accepted)
        _fill(state, state.top - top, accepted)
        return state

    def _context(self, model: TokenModel) -> int:
        return min(self.context, model.grid[1])


def _fill(state: ParallelJacobiState, closed: torch.LongTensor, accepted: torch.LongTensor) -> None:
    """Move the draft laws on after `closed` [B] rows gave up their lanes and those in the lanes gained `accepted` [B, L]
    codes, and draft what enters the windows."""
    lanes, window, vocab_size = state.draft_law.shape[1:]
    row, _, count = row_lanes(state)
    offsets = torch.arange(window, device=row.device)
    old_lane = torch.arange(lanes, device=row.device) + closed[:, None]
    old_offset = offsets + accepted.gather(1, old_lane.clamp(max=lanes - 1))[..., None]
    fresh = (old_lane >= lanes)[..., None] | (old_offset >= window)
    old = old_lane.clamp(max=lanes - 1)[..., None] * window + old_offset.clamp(max=window - 1)
    law = state.draft_law.flatten(1, 2).gather(1, old.flatten(1)[..., None].expand(-1, -1, vocab_size))
    allowed = state.sampling.allowed
    weights = torch.ones(vocab_size, device=law.device) if allowed is None else allowed.float()
    fresh_law = (weights / weights.sum()).expand_as(state.draft_law)
    state.draft_law = torch.where(fresh[..., None], fresh_law, law.view_as(fresh_law))

    rows, columns = state.model.grid
    places = count[..., None] + offsets
    inside = (row < rows)[..., None] & (places < columns)
    positions = (row[..., None] * columns + places).clamp(max=state.model.num_tokens - 1).flatten(1)
    noise = uniforms(state.seeds, positions, Purpose.START, state.forward_passes, 1)
    drafts = draw(fresh_law.flatten(1, 2), noise[..., 0])
    write_tokens(state, positions, (fresh & inside).flatten(1), drafts)
