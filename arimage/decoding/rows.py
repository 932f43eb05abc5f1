"""Rows of an image that are decoded side by side, which the row-parallel decodings share."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .autoregressive import AutoregressiveDecoding
from .distribution import Sampling
from .interface import TokenModel
from .state import DecodingState
from .window import write_tokens


@dataclass
class RowState(DecodingState):
    """Adds to `DecodingState`: `lanes`, how many rows of an image a pass evaluates, and `top` [B], the first of them.

    The rows above `top` are decided and their keys and values lie in the cache, but those of the last code of row
    top - 1 where no code of `top` is decided: its first query writes them.
    """

    lanes: int = 1
    top: torch.LongTensor = None


@dataclass
class RowPass:
    """What a pass over the L lanes of B images gives, for the W positions after the last code decided in each row.

    Attributes:
        positions: int64 [B, L, W]; where `live` is False they mean nothing.
        live: bool [B, L, W], the positions of a row that may be decided now.
        opening: bool [B, L], whether the row holds no code yet and the row above is not complete.
        law: float32 [B, L, W, V].
    """

    positions: torch.LongTensor
    live: torch.BoolTensor
    opening: torch.BoolTensor
    law: torch.FloatTensor


def start_rows(model: TokenModel, sampling: Sampling, seeds: torch.LongTensor, context: int) -> RowState:
    """Prefill and decide position 0, for rows that begin once the row above holds `context` codes."""
    rows, columns = model.layout.shape
    # An open row gains a code in every pass and one more pass takes in its last: it needs its lane for `columns` passes
    # after the one that decides its first code. Where it gains no more than one, the row below begins `context` passes
    # after it at the earliest, the m-th row below m * context passes, so that m <= columns // context are open beside it.
    # Rows that gain more may meet while many are open; those without a lane wait. Where complete rows are the context, a
    # row is taken in by the first query of the next.
    lanes = min(rows, columns // context + 1) if context < columns else 1
    # No row of a single lane begins without the code before it: its cache is that of autoregressive decoding.
    state = AutoregressiveDecoding().start(model, sampling, seeds, scratch=int(lanes > 1))
    state = RowState(**vars(state), lanes=lanes)
    state.top = _first_open_row(state, torch.zeros_like(seeds)[:, None].expand(-1, rows))
    return state


def forward_rows(state: RowState, window: int, context: int) -> RowPass:
    """Evaluate the last code of every open row and the `window` - 1 drafts after it.

    A query sees the decided codes up to its own position and the drafts before it in its own row. A row that has no code
    begins with the code before it; where that is not known yet, with its stand-in, which only this one query sees.
    """
    rows, columns = state.model.layout.shape
    size = state.model.num_tokens
    row, above, count = row_lanes(state)
    is_open = (row < rows) & ((count > 0) | (above >= context))
    opening = is_open & (count == 0) & (above < columns)

    offsets = torch.arange(window, device=row.device)
    first = (row * columns + count)[..., None]
    positions = first + offsets
    live = is_open[..., None] & (offsets < (above - count)[..., None])
    # The last code of a row is fed even if none after it may be decided, so that others see it.
    fed = (live | (is_open[..., None] & (offsets == 0))).flatten(1)
    stands_in = (opening[..., None] & (offsets == 0)).flatten(1)
    at = (positions - 1).flatten(1)
    slots = torch.arange(size, device=row.device)
    drafted = slots >= first.expand_as(positions).flatten(1)[..., None]
    visible = (slots <= at[..., None]) & (state.decided[:, None] | drafted)
    if state.lanes > 1:
        visible = torch.cat([visible, stands_in[..., None]], dim=-1)
    codes = state.tokens.gather(1, at.clamp(0, size - 1))
    logits = state.model.forward(
        torch.where(stands_in, -1, codes),
        torch.where(fed, at, -1),
        state.cache,
        visible=visible,
        slots=torch.where(stands_in, size, at),
    )
    positions = positions.clamp(max=size - 1)
    law = state.sampling.probabilities(logits, positions.flatten(1))
    return RowPass(positions, live, opening, law.unflatten(1, (state.lanes, window)))


def decide(state: RowState, run: RowPass, tokens: torch.LongTensor, accepted: torch.LongTensor) -> None:
    """Write `tokens` [B, L, W] at the live positions, decide the first `accepted` [B, L] of each row and count the pass."""
    before = _row_counts(state)
    positions, live = run.positions.flatten(1), run.live.flatten(1)
    write_tokens(state, positions, live, tokens.flatten(1))
    offsets = torch.arange(run.live.shape[2], device=live.device)
    decided = live & (offsets < accepted[..., None]).flatten(1)
    size = state.model.num_tokens
    state.decided = F.pad(state.decided, (0, 1)).scatter(1, torch.where(decided, positions, size), True)[:, :size]
    state.finished = state.decided.all(1)
    state.top = _first_open_row(state, before)
    state.record(accepted.sum(1))


def row_lanes(state: RowState) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """The row of each lane, how many codes are decided in the row above it and how many in itself, each [B, L]."""
    rows, columns = state.model.layout.shape
    row = state.top[:, None] + torch.arange(state.lanes, device=state.top.device)
    # As if a complete row lay above the image.
    counts = F.pad(_row_counts(state), (1, 1), value=columns)
    above, count = (counts.gather(1, (row + below).clamp(max=rows + 1)) for below in (0, 1))
    return row, above, count


def _row_counts(state: RowState) -> torch.LongTensor:
    """How many codes are decided in each row [B, R]."""
    return state.decided.unflatten(1, state.model.layout.shape).sum(2)


def _first_open_row(state: RowState, before: torch.LongTensor) -> torch.LongTensor:
    """The first row [B] that needs another pass, where `before` [B, R] codes were decided before the last one."""
    columns = state.model.layout.columns
    counts = _row_counts(state)
    below = F.pad(counts, (0, 1))[:, 1:]
    # A row that was complete before the pass was fed its last code in it.
    closed = (before == columns) | ((counts == columns) & (below == 0))
    return closed.sum(1)
