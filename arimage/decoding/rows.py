"""Rows of an image that are decoded in parallel, which the row-parallel decodings share."""

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F

from .autoregressive import decide_first
from .distribution import Sampling
from .interface import TokenModel
from .state import DecodingState


@dataclass
class RowState(DecodingState):
    """Adds to `DecodingState`: `in_flight`, how many rows of an image a step evaluates, `top` [B], the first of them, and
    `decided_buffer` [B, N + 1], which tokens are final; its last column takes what is thrown away.

    The rows above `top` are decided and their keys and values lie in the cache, except those of the last token of row top - 1
    while no token of `top` is decided: its first query writes them.
    """

    model: TokenModel
    in_flight: int
    top: torch.LongTensor
    decided_buffer: torch.BoolTensor

    @property
    def decided(self) -> torch.BoolTensor:
        """Bool [B, N], which tokens are final."""
        return self.decided_buffer[:, :-1]

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        columns = self.model.layout.columns
        return self.top.max() * columns, self.in_flight * columns


_State = TypeVar("_State", bound=RowState)


@dataclass
class RowStep:
    """What a forward pass over the L rows in flight of B images returns, for the W positions after the last decided token of
    each row.

    Attributes:
        positions: int64 [B, L, W]; where `live` is False they mean nothing.
        live: bool [B, L, W], the positions of a row that may be decided now.
        opening: bool [B, L], whether the row holds no token yet and the row above is not complete.
        probabilities: float32 [B, L, W, V].
    """

    positions: torch.LongTensor
    live: torch.BoolTensor
    opening: torch.BoolTensor
    probabilities: torch.FloatTensor


def default_context(columns: int) -> int:
    """How many tokens of the row above a row waits for, by default: a third of a row, as in the published settings for grids
    of 24 to 90 columns, but at least 12, since less leaves small grids without the context that their models rely on."""
    return max(columns // 3, 12)


def rows_in_flight(layout, context: int) -> int:
    """How many rows of an image may be open at once, where a row begins when the row above holds `context` tokens.

    A row is in flight for `columns` steps after its first token (one more feeds its last token), and the m-th row below it
    begins m * context steps later at the earliest. Where complete rows are the context, it is one.
    """
    return min(layout.rows, layout.columns // context + 1) if context < layout.columns else 1


def start_rows(
    state_class: type[_State], model: TokenModel, sampling: Sampling, seeds: torch.LongTensor, context: int, **buffers
) -> _State:
    """Prefill and decide rank 0, for rows that begin once the row above holds `context` tokens; `buffers` are the fields that
    `state_class` adds to `RowState`."""
    in_flight = rows_in_flight(model.layout, context)
    # With one row in flight none begins without the token before it: its cache is that of autoregressive decoding.
    cache, logits = model.prefill(len(seeds), int(in_flight > 1))
    decided = torch.zeros(len(seeds), model.num_tokens + 1, dtype=torch.bool, device=seeds.device)
    decided[:, 0] = True
    state = state_class.open(
        model,
        sampling,
        seeds,
        cache,
        in_flight=in_flight,
        top=torch.zeros_like(seeds),
        decided_buffer=decided,
        **buffers,
    )
    decide_first(state, logits)
    state.top.copy_(_first_open_row(state, torch.zeros_like(seeds)[:, None].expand(-1, model.layout.rows)))
    return state


def forward_rows(state: RowState, window: int, context: int) -> RowStep:
    """Evaluate the last token of every open row and the `window` - 1 drafts after it.

    A query sees the decided tokens up to its own position and the drafts before it in its own row. A row without tokens begins
    with the token before it; while that is not known, with its stand-in, which only this query sees.
    """
    layout, size = state.model.layout, state.model.num_tokens
    row, above, count = open_rows(state)
    is_open = (row < layout.rows) & ((count > 0) | (above >= context))
    opening = is_open & (count == 0) & (above < layout.columns)

    offsets = torch.arange(window, device=row.device)
    first = (row * layout.columns + count)[..., None]
    positions = first + offsets
    live = is_open[..., None] & (offsets < (above - count)[..., None])
    # The last token of a row is fed even if none after it may be decided, so that others see it.
    fed = (live | (is_open[..., None] & (offsets == 0))).flatten(1)
    stands_in = (opening[..., None] & (offsets == 0)).flatten(1)
    at = (positions - 1).flatten(1)
    slots = torch.arange(size, device=row.device)
    drafted = slots >= first.expand_as(positions).flatten(1)[..., None]
    visible = (slots <= at[..., None]) & (state.decided[:, None] | drafted)
    if state.in_flight > 1:
        visible = torch.cat([visible, stands_in[..., None]], dim=-1)
    tokens = state.tokens.gather(1, at.clamp(0, size - 1))
    logits = state.model.forward(
        torch.where(stands_in, -1, tokens),
        torch.where(fed, at, -1),
        state.cache,
        visible=visible,
        slots=torch.where(stands_in, size, at),
    )
    positions = positions.clamp(max=size - 1)
    probabilities = state.probabilities(logits, positions.flatten(1), live.flatten(1))
    return RowStep(positions, live, opening, probabilities.unflatten(1, (state.in_flight, window)))


def decide(state: RowState, step: RowStep, tokens: torch.LongTensor, accepted: torch.LongTensor) -> None:
    """Write `tokens` [B, L, W] at the live positions, decide the first `accepted` [B, L] of each row and count the step."""
    before = _row_counts(state)
    positions, live = step.positions.flatten(1), step.live.flatten(1)
    state.write_tokens(positions, live, tokens.flatten(1))
    offsets = torch.arange(step.live.shape[2], device=live.device)
    decided = live & (offsets < accepted[..., None]).flatten(1)
    state.decided_buffer.scatter_(1, torch.where(decided, positions, state.model.num_tokens), True)
    state.record(accepted.sum(1))
    state.finished.copy_(state.decided.all(1))
    state.top.copy_(_first_open_row(state, before))


def open_rows(state: RowState) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor]:
    """The rows in flight, how many tokens are decided in the row above each and in itself, [B, L] each."""
    layout = state.model.layout
    row = state.top[:, None] + torch.arange(state.in_flight, device=state.top.device)
    # As if a complete row lay above the image.
    counts = F.pad(_row_counts(state), (1, 1), value=layout.columns)
    above, count = (counts.gather(1, (row + below).clamp(max=layout.rows + 1)) for below in (0, 1))
    return row, above, count


def _row_counts(state: RowState) -> torch.LongTensor:
    """How many tokens are decided in each row [B, R]."""
    return state.decided.unflatten(1, (state.model.layout.rows, -1)).sum(2)


def _first_open_row(state: RowState, before: torch.LongTensor) -> torch.LongTensor:
    """The first row [B] that needs another step, where `before` [B, R] tokens were decided before the last one."""
    columns = state.model.layout.columns
    counts = _row_counts(state)
    below = F.pad(counts, (0, 1))[:, 1:]
    # A row that was complete before the step was fed its last token in it.
    closed = (before == columns) | ((counts == columns) & (below == 0))
    return closed.sum(1)
