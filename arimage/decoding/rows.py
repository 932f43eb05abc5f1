"""Decoding of several rows of an image in parallel, shared by the row-parallel decodings."""

from dataclasses import dataclass
from typing import TypeVar

import torch

from .autoregressive import decide_first
from .contract.distribution import Sampling
from .contract.layout import Layout
from .contract.models import TokenModel
from .contract.state import DecodingState


@dataclass
class RowState(DecodingState):
    """Adds to `DecodingState`. L rows are in flight, in any order: when a row is complete, its slot moves on to the
    row L further. Rows after the end of the image are never open.

    All rows above the first row in flight are decided, and their keys and values are in the cache. The exception is
    the last token before a row that has no token yet: the first query of the row writes its keys and values.

    Attributes:
        row: int64 [B, L], the rows in flight.
        counts: int64 [B, 1 + R + L + 1], the number of decided tokens in each of the R rows, padded with a complete
            row above the image and empty rows below.
    """

    model: TokenModel
    row: torch.LongTensor
    counts: torch.LongTensor

    @property
    def decided(self) -> torch.BoolTensor:
        """Bool [B, N], which tokens are final."""
        layout = self.model.layout
        columns = torch.arange(layout.columns, device=self.counts.device)
        return (columns < self.counts[:, 1 : 1 + layout.rows, None]).flatten(1)

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        columns = self.model.layout.columns
        return self.row.amin(1).max() * columns, self.row.shape[1] * columns

    def finish(self) -> None:
        layout = self.model.layout
        self.counts[:, : 1 + layout.rows] = layout.columns
        self.row.fill_(layout.rows)
        super().finish()


_State = TypeVar("_State", bound=RowState)


@dataclass
class RowStep:
    """The result of a forward pass over W positions in each of the L rows in flight of B images.

    Attributes:
        positions: int64 [B, L, W].
        ended: bool [B, L, W], the positions that may not be decided now; values there are undefined.
        opening: bool [B, L], whether the row has no token yet and the row above is not complete.
        count, end: int64 [B, L], how many tokens of the row are decided, and how many may be decided now.
        probabilities: float32 [B, L, W, V].
    """

    positions: torch.LongTensor
    ended: torch.BoolTensor
    opening: torch.BoolTensor
    count: torch.LongTensor
    end: torch.LongTensor
    probabilities: torch.FloatTensor


def context_of(layout: Layout, given: int | None) -> int:
    """The number of tokens in the row above that a row waits for: the `given` one, but at most a row. None is a third
    of a row, as in the published settings for grids of 24 to 90 columns, but at least 12, since models of small grids
    need that much context."""
    return min(given or max(layout.columns // 3, 12), layout.columns)


def rows_in_flight(layout: Layout, context: int) -> int:
    """How many rows of an image may be open at once if a row begins when the row above has `context` tokens.

    A row is in flight for `columns` steps after its first token (one more step feeds its last token), and the m-th row
    below it begins m * context steps later at the earliest. With complete rows as context, only one row is open.
    """
    return min(layout.rows, layout.columns // context + 1) if context < layout.columns else 1


def start_rows(
    state_class: type[_State], model: TokenModel, sampling: Sampling, seeds: torch.LongTensor, context: int, **buffers
) -> _State:
    """Prefill and decide rank 0, for rows that begin once the row above has `context` tokens; `buffers` are the fields
    that `state_class` adds to `RowState`."""
    layout, in_flight = model.layout, rows_in_flight(model.layout, context)
    # With one row in flight, no row begins without the token before it, so no scratch slot is needed.
    cache, logits = model.prefill(len(seeds), int(in_flight > 1))
    counts = seeds.new_zeros(len(seeds), layout.rows + in_flight + 2)
    counts[:, 0] = layout.columns
    counts[:, 1] = 1
    row = torch.arange(in_flight, device=seeds.device).repeat(len(seeds), 1)
    # A row of one token is complete.
    row += in_flight * ((row == 0) & (layout.columns == 1))
    # Tokens of rows after the end of the image are discarded.
    spare = (in_flight + 1) * layout.columns
    state = state_class.open(model, sampling, seeds, cache, spare=spare, row=row, counts=counts, **buffers)
    decide_first(state, logits)
    return state


def forward_rows(state: RowState, column: torch.LongTensor | None, context: int) -> RowStep:
    """Evaluate the last token of every open row and the drafts after it, at the columns `column` [B, L, W] that follow
    the decided tokens, in any order; None evaluates the first of these columns only.

    A query attends to the decided tokens up to its own position and to the drafts before it in its own row. The first
    query of a row is the token before the row. While that token is not known, a stand-in takes its place, which only
    this query attends to.
    """
    layout, size = state.model.layout, state.model.num_tokens
    above, count = state.counts.gather(1, state.row), state.counts[:, 1:].gather(1, state.row)
    column = count[..., None] if column is None else column
    begun = count > 0
    is_open = (state.row < layout.rows) & (begun | (above >= context))
    opening = (is_open > begun) & (above < layout.columns)
    begin = (state.row * layout.columns)[..., None]
    positions, end = begin + column, above * is_open
    ended, first = column >= end[..., None], column == count[..., None]
    # The last token of a row is fed even if no token after it may be decided, so that others can attend to it.
    left_out = (ended > (is_open[..., None] & first)).flatten(1)
    stands_in = (opening[..., None] & first).flatten(1)
    at = positions - 1
    slots = torch.arange(size, device=at.device)
    visible = (slots <= at[..., None]) & (state.decided[:, None, None] | (slots >= begin[..., None]))
    visible, at = visible.flatten(1, 2), at.flatten(1)
    if state.row.shape[1] > 1:
        visible = torch.cat([visible, stands_in[..., None]], dim=-1)
    logits = state.model.forward(
        state.token_buffer.gather(1, at).masked_fill(stands_in, -1),
        at.masked_fill(left_out, -1),
        state.cache,
        visible=visible,
        slots=at.masked_fill(stands_in, size),
    )
    probabilities = state.probabilities(logits, positions.flatten(1), ended.flatten(1))
    return RowStep(positions, ended, opening, count, end, probabilities.unflatten(1, positions.shape[1:]))


def decide(state: RowState, step: RowStep, tokens: torch.LongTensor, accepted: torch.LongTensor) -> torch.BoolTensor:
    """Write `tokens` [B, L, W] at the positions that have not `ended`, decide the first `accepted` [B, L] of each row
    and count the step.

    Returns:
        Bool [B, L], whether a slot moved on to another row.
    """
    layout, columns = state.model.layout, state.model.layout.columns
    written = step.positions.masked_fill(step.ended, state.model.num_tokens)
    state.token_buffer.scatter_(1, written.flatten(1), tokens.flatten(1))
    state.counts[:, 1:].scatter_add_(1, state.row, accepted)
    state.record(accepted.sum(1))
    torch.eq(state.counts[:, layout.rows], columns, out=state.finished)
    # The last token of a row that was complete before this step was fed in it; otherwise the row below feeds that
    # token.
    below = state.counts[:, 2:].gather(1, state.row)
    closed = (step.count == columns) | (step.count + accepted - below == columns)
    state.row.add_(closed, alpha=state.row.shape[1])
    return closed
