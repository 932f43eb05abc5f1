"""Speculative Jacobi decoding: draft a window, verify it in one pass, and let that same pass draft the next window."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F

from .autoregressive import AutoregressiveDecoding
from .coupling import couple, draw
from .interface import TokenModel
from .law import Sampling
from .noise import Purpose, exponentials, uniforms
from .state import DecodingState


Refresh = Literal["independent", "coupled", "gumbel"]
Init = Literal["uniform", "left", "above"]


@dataclass
class WindowState(DecodingState):
    """Adds to `DecodingState`: `cursor` [B], the first position not decided, and `draft_law` [B, W, V], the laws that the
    drafts at cursor .. cursor + W - 1 were drawn from."""

    cursor: torch.LongTensor = None
    draft_law: torch.FloatTensor = None


@dataclass(frozen=True)
class SpeculativeJacobiDecoding:
    """Speculative Jacobi decoding (https://arxiv.org/abs/2410.01699), exact for every setting.

    A pass evaluates `window` drafts after an image's cursor. The leading drafts that survive verification are decided, the
    first that does not is replaced by a draw from the residual law and decided too. The other drafts are drawn anew from
    the laws just computed. Every image has a cursor of its own, so none waits for another.

    Attributes:
        window: drafts a pass, >= 1; 1 is autoregressive decoding.
        refresh: how the drafts that were not decided are drawn anew: "independent" of the old ones (the original method);
            "coupled" to them, so that as many as possible stay and the next pass verifies what it saw before
            (https://arxiv.org/abs/2510.24211; its maximal coupling); or by "gumbel" noise fixed for each position (its
            other coupling).
        init: the draft at a position that enters the window: a code drawn from the "uniform" law, or a copy of the code to
            the "left" or "above" it.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 32
    refresh: Refresh = "coupled"
    init: Init = "uniform"

    exact: ClassVar[bool] = True

    def __post_init__(self):
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window is {self.window!r}: give a whole number of at least 1")
        for name, values in (("refresh", Refresh), ("init", Init)):
            if getattr(self, name) not in get_args(values):
                raise ValueError(f"{name} is {getattr(self, name)!r}: choose among {', '.join(get_args(values))}")

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> WindowState:
        state = WindowState(**vars(AutoregressiveDecoding().start(model, sampling, seeds)))
        window = min(self.window, model.num_tokens)
        state.cursor = torch.ones_like(seeds)
        state.draft_law = torch.zeros(len(seeds), window, model.vocab_size, device=model.device)
        self._fill_window(state, torch.full_like(seeds, window))
        return state

    def step(self, state: WindowState) -> WindowState:
        offsets, positions, live = _window(state)
        at = positions.clamp(max=state.model.num_tokens - 1)
        previous = state.tokens.gather(1, (at - 1).clamp(min=0))
        logits = state.model.forward(previous, torch.where(live, positions - 1, -1), state.cache)
        law = state.sampling.law(logits, at)
        drafts = state.tokens.gather(1, at)
        passes = state.forward_passes
        noise = uniforms(state.seeds, at, Purpose.VERIFY, passes, 2)
        verified, kept = couple(law, state.draft_law, drafts, noise)
        leading = (kept & live).long().cumprod(1).sum(1)
        accepted = torch.minimum(leading + 1, live.sum(1))
        if self.refresh == "coupled":
            redrawn = verified
        elif self.refresh == "independent":
            redrawn = draw(law, uniforms(state.seeds, at, Purpose.REFRESH, passes, 1)[..., 0])
        else:
            # The largest of p / e is that of log p plus Gumbel noise.
            race = exponentials(state.seeds, at, Purpose.GUMBEL, 0, law.shape[-1])
            redrawn = (law / race).argmax(-1)
        tokens = torch.where(offsets < accepted[:, None], verified, redrawn)
        _write(state, positions, live, tokens)
        state.cursor = state.cursor + accepted
        state.finished = state.cursor >= state.model.num_tokens
        state.decided = torch.arange(state.model.num_tokens, device=law.device) < state.cursor[:, None]
        state.record(accepted)
        state.draft_law = law
        self._fill_window(state, accepted)
        return state

    def _fill_window(self, state: WindowState, entered: torch.LongTensor) -> None:
        """Move the draft laws to the window at the new cursor and draft the last `entered` [B] positions of it."""
        offsets, positions, live = _window(state)
        window, vocab_size = state.draft_law.shape[1:]
        old = offsets + entered[:, None]
        law = state.draft_law.gather(1, old.clamp(max=window - 1)[..., None].expand(-1, -1, vocab_size))
        fresh = old >= window
        at = positions.clamp(max=state.model.num_tokens - 1)
        if self.init == "uniform":
            allowed = state.sampling.allowed
            weights = torch.ones(vocab_size, device=law.device) if allowed is None else allowed.float()
            fresh_law = (weights / weights.sum()).expand_as(law)
            drafts = draw(fresh_law, uniforms(state.seeds, at, Purpose.START, state.forward_passes, 1)[..., 0])
        else:
            first = (state.cursor + window - entered)[:, None]
            source = first - 1
            if self.init == "above":
                columns = state.model.grid[1]
                # As many rows up as it takes to leave the positions that are being drafted.
                above = positions - columns * ((positions - first).div(columns, rounding_mode="floor") + 1)
                source = torch.where(above >= 0, above, source)
            drafts = state.tokens.gather(1, source.expand_as(at).clamp(0, state.model.num_tokens - 1))
            fresh_law = F.one_hot(drafts, vocab_size).to(law.dtype)
        state.draft_law = torch.where(fresh[..., None], fresh_law, law)
        _write(state, positions, live & fresh, drafts)


def _window(state: WindowState) -> tuple[torch.LongTensor, torch.LongTensor, torch.BoolTensor]:
    """Offsets [W] in the window, its positions [B, W], and which of them lie in the image [B, W]."""
    offsets = torch.arange(state.draft_law.shape[1], device=state.cursor.device)
    positions = state.cursor[:, None] + offsets
    return offsets, positions, positions < state.model.num_tokens


def _write(state: WindowState, positions: torch.LongTensor, where: torch.BoolTensor, tokens: torch.LongTensor) -> None:
    """Put `tokens` at `positions` [B, W] of the images `where` [B, W] says so."""
    size = state.model.num_tokens
    state.tokens = F.pad(state.tokens, (0, 1)).scatter(1, torch.where(where, positions, size), tokens)[:, :size]
