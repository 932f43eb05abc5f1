"""The window of drafts ahead of an image's cursor, which the speculative Jacobi decodings share."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from ..kernels.coupling import sample
from .autoregressive import AutoregressiveDecoding
from .distribution import Sampling
from .interface import TokenModel
from .noise import Purpose, uniforms
from .state import DecodingState


Init = Literal["uniform", "left", "above"]


@dataclass
class WindowState(DecodingState):
    """Adds to `DecodingState`: `cursor` [B], the first position not decided, and `draft_probabilities` [B, W, V], the laws that the
    drafts at cursor .. cursor + W - 1 were drawn from."""

    cursor: torch.LongTensor = None
    draft_probabilities: torch.FloatTensor = None


def open_window(
    model: TokenModel, sampling: Sampling, seeds: torch.LongTensor, window: int, init: Init, scratch: int = 0
) -> WindowState:
    """Prefill, decide position 0 and draft the `window` positions after it; the cache gets `scratch` more slots."""
    state = WindowState(**vars(AutoregressiveDecoding().start(model, sampling, seeds, scratch)))
    window = min(window, model.num_tokens)
    state.cursor = torch.ones_like(seeds)
    state.draft_probabilities = torch.zeros(len(seeds), window, model.vocab_size, device=model.device)
    _fill(state, torch.full_like(seeds, window), init)
    return state


def window_positions(state: WindowState) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
    """Offsets [W] in the window, its positions [B, W], and which of them lie in the image [B, W]."""
    offsets = torch.arange(state.draft_probabilities.shape[1], device=state.cursor.device)
    positions = state.cursor[:, None] + offsets
    return offsets, positions, positions < state.model.num_tokens


def write_tokens(state: DecodingState, positions: torch.LongTensor, where: torch.BoolTensor, tokens: torch.LongTensor):
    """Put `tokens` at `positions` [B, Q] of the images `where` [B, Q] says so."""
    size = state.model.num_tokens
    state.tokens = F.pad(state.tokens, (0, 1)).scatter(1, torch.where(where, positions, size), tokens)[:, :size]


def uniform_probabilities(state: DecodingState, positions: torch.LongTensor) -> torch.FloatTensor:
    """The laws [B, Q, V] of the codes at `positions` [B, Q] as far as nothing but the forced ones is known."""
    allowed = state.sampling.allowed
    weights = torch.ones(state.model.vocab_size, device=state.model.device) if allowed is None else allowed.float()
    return state.sampling.force((weights / weights.sum()).expand(*positions.shape, -1), positions)


def slide_window(state: WindowState, accepted: torch.LongTensor, init: Init) -> None:
    """Decide the first `accepted` [B] drafts of the window, count the pass, and draft what enters the window."""
    state.cursor = state.cursor + accepted
    state.finished = state.cursor >= state.model.num_tokens
    state.decided = torch.arange(state.model.num_tokens, device=accepted.device) < state.cursor[:, None]
    state.record(accepted)
    _fill(state, accepted, init)


def resize_window(state: WindowState, window: int, init: Init) -> None:
    """Keep the first `window` drafts, or draft as many more as it takes."""
    window = min(window, state.model.num_tokens)
    more = window - state.draft_probabilities.shape[1]
    if more <= 0:
        state.draft_probabilities = state.draft_probabilities[:, :window]
    else:
        state.draft_probabilities = F.pad(state.draft_probabilities, (0, 0, more, 0))
        _fill(state, torch.full_like(state.cursor, more), init)


def _fill(state: WindowState, entered: torch.LongTensor, init: Init) -> None:
    """Move the draft laws to the window at the new cursor and draft the last `entered` [B] positions of it."""
    window, vocab_size = state.draft_probabilities.shape[1:]
    offsets, positions, live = window_positions(state)
    old = offsets + entered[:, None]
    law = state.draft_probabilities.gather(1, old.clamp(max=window - 1)[..., None].expand(-1, -1, vocab_size))
    fresh = old >= window
    at = positions.clamp(max=state.model.num_tokens - 1)
    if init == "uniform":
        fresh_law = uniform_probabilities(state, at)
    else:
        first = (state.cursor + window - entered)[:, None]
        source = first - 1
        if init == "above":
            columns = state.model.layout.columns
            # As many rows up as it takes to leave the positions that are being drafted.
            above = positions - columns * ((positions - first).div(columns, rounding_mode="floor") + 1)
            source = torch.where(above >= 0, above, source)
        copied = state.tokens.gather(1, source.expand_as(at).clamp(0, state.model.num_tokens - 1))
        fresh_law = state.sampling.force(F.one_hot(copied, vocab_size).to(law.dtype), at)
    drafts = sample(fresh_law, uniforms(state.seeds, at, Purpose.START, state.forward_passes, 1)[..., 0])
    state.draft_probabilities = torch.where(fresh[..., None], fresh_law, law)
    write_tokens(state, positions, live & fresh, drafts)
