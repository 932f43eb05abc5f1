"""The window of drafts ahead of an image's cursor, which the speculative Jacobi decodings share."""

from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F

from ..kernels.coupling import sample
from .autoregressive import decide_first
from .distribution import Sampling
from .interface import TokenModel
from .noise import Purpose, uniforms
from .state import DecodingState


Init = Literal["uniform", "left", "above"]
# The neighbour whose token is copied.
_OFFSETS = {"left": (0, -1), "above": (-1, 0)}


@dataclass
class WindowState(DecodingState):
    """Adds to `DecodingState`.

    Attributes:
        cursor: int64 [B], the first position that is not decided.
        window: W, the drafts in use; it changes between steps only.
        draft_probabilities: float32 [B, capacity, V], what the drafts at cursor .. cursor + W - 1 were sampled from.
        init: how positions that enter the window are drafted.
        neighbour: int64 [1 or B, N], the rank whose token `init` copies, -1 outside of the image; None for "uniform".
    """

    model: TokenModel
    cursor: torch.LongTensor
    window: int
    draft_probabilities: torch.FloatTensor
    init: Init
    neighbour: torch.LongTensor | None

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.cursor.max(), self.window


_State = TypeVar("_State", bound=WindowState)


def open_window(
    state_class: type[_State],
    model: TokenModel,
    sampling: Sampling,
    seeds: torch.LongTensor,
    window: int,
    init: Init,
    *,
    scratch: int = 0,
    capacity: int | None = None,
    **buffers,
) -> _State:
    """Prefill, decide rank 0 and draft the `window` positions after it.

    Args:
        scratch: slots of the cache beyond those of the image.
        capacity: the largest window that the state has room for, by default `window`.
        buffers: the fields that `state_class` adds to `WindowState`.
    """
    cache, logits = model.prefill(len(seeds), scratch)
    window, capacity = (min(size, model.num_tokens) for size in (window, capacity or window))
    ranks = torch.arange(model.num_tokens, device=model.device)
    layout = model.layout
    state = state_class.open(
        model,
        sampling,
        seeds,
        cache,
        cursor=torch.ones_like(seeds),
        window=window,
        draft_probabilities=torch.zeros(len(seeds), capacity, model.vocab_size, device=model.device),
        init=init,
        neighbour=None if init == "uniform" else layout.neighbours(layout.expand(ranks), _OFFSETS[init]),
        **buffers,
    )
    decide_first(state, logits)
    _fill(state, torch.full_like(seeds, window), state.draft_probabilities[:, :window])
    return state


def window_positions(
    state: WindowState,
) -> tuple[torch.LongTensor, torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
    """Offsets [W] in the window, its positions [B, W], the same clamped to the image, and which lie in the image [B, W]."""
    offsets = torch.arange(state.window, device=state.cursor.device)
    positions = state.cursor[:, None] + offsets
    last = state.model.num_tokens - 1
    return offsets, positions, positions.clamp(max=last), positions <= last


def slide_window(state: WindowState, accepted: torch.LongTensor, probabilities: torch.FloatTensor) -> torch.BoolTensor:
    """Decide the first `accepted` [B] drafts of the window, count the step, and draft what enters the window.

    Args:
        probabilities: [B, W, V], what the drafts of the window were sampled from.

    Returns:
        Bool [B, W], the positions of the new window that entered it.
    """
    state.cursor += accepted
    size = state.model.num_tokens
    torch.lt(torch.arange(size + 1, device=accepted.device), state.cursor[:, None], out=state.decided_buffer)
    state.record(accepted)
    torch.ge(state.cursor, size, out=state.finished)
    return _fill(state, accepted, probabilities)


def resize_window(state: WindowState, window: int) -> None:
    """Keep the first `window` drafts, or draft as many more as it takes."""
    more = min(window, state.model.num_tokens) - state.window
    drafted = state.draft_probabilities[:, : state.window]
    state.window += more
    if more > 0:
        _fill(state, torch.full_like(state.cursor, more), F.pad(drafted, (0, 0, more, 0)))


def _fill(state: WindowState, entered: torch.LongTensor, probabilities: torch.FloatTensor) -> torch.BoolTensor:
    """Draft the last `entered` [B] positions of the window; the others keep theirs of `probabilities` [B, W, V], which begin
    `entered` positions before the window. Returns which positions are new."""
    vocab_size = probabilities.shape[2]
    offsets, positions, at, live = window_positions(state)
    old = offsets + entered[:, None]
    kept = probabilities.gather(1, old.clamp(max=state.window - 1)[..., None].expand(-1, -1, vocab_size))
    fresh = old >= state.window
    if state.neighbour is None:
        start = state.sampling.uniform(at, vocab_size)
    else:
        first = (state.cursor + state.window - entered)[:, None]
        copied = state.tokens.gather(1, _source(state, at, first))
        start = state.sampling.force(F.one_hot(copied, vocab_size).to(kept.dtype), at)
    drafts = sample(start, uniforms(state.seeds, at, Purpose.START, state.steps, 1)[..., 0])
    torch.where(fresh[..., None], start, kept, out=state.draft_probabilities[:, : state.window])
    state.write_tokens(positions, live & fresh, drafts)
    return fresh


def _source(state: WindowState, at: torch.LongTensor, first: torch.LongTensor) -> torch.LongTensor:
    """The ranks [B, W] whose tokens are copied to `at`: the nearest in the direction of `init` that lie before `first` [B, 1];
    where there is none, the last before it."""
    assert state.neighbour is not None
    neighbour = state.neighbour.expand(len(at), -1)
    rank = at
    # One row up may lie in what is being drafted, so many rows up it does not.
    jumps = 1 if state.init == "left" else -(-state.window // state.model.layout.columns)
    for _ in range(jumps):
        rank = torch.where(rank >= first, neighbour.gather(1, rank.clamp(min=0)), rank)
    return torch.where((rank >= 0) & (rank < first), rank, first - 1).clamp(max=state.model.num_tokens - 1)
