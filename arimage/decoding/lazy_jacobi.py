"""Speculative Jacobi decoding that evaluates a far window only where something changed."""

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
import torch.nn.functional as F

from ..kernels.coupling import couple_window
from .distribution import Sampling
from .interface import TokenModel
from .noise import Purpose, uniforms
from .settings import check_settings
from .window import Init, WindowState, open_window, slide_window, window_positions, write_tokens


@dataclass
class LazyState(WindowState):
    """Adds to `WindowState`: `outdated` [B, W], where a neighbour's code changed since the draft's law was computed."""

    outdated: torch.BoolTensor = None


@dataclass(frozen=True)
class LazyJacobiDecoding:
    """Coupled speculative Jacobi decoding that spends a pass on the drafts that may change; exact for every setting.

    With coupled drafts (https://arxiv.org/abs/2510.24211) most drafts of a long window stay what they were. A pass evaluates
    the first `chain` drafts after an image's cursor, which it may decide, and further ahead those drafts whose neighbour to
    the left, above, above-left or above-right changed since they were evaluated, `tokens` in all. So the drafts far ahead
    settle before the cursor comes, for the cost of a window of `tokens`.

    Exact, since a draft is evaluated for what changed before it, never for what it is or for what comes after it, and is
    decided in a pass that evaluates everything between it and the cursor.

    Attributes:
        window: drafts kept ahead, >= `tokens`.
        chain: drafts evaluated in every pass, 1 .. `tokens`.
        tokens: drafts evaluated in a pass at most.
        init: the draft at a position that enters the window, as in `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 64
    chain: int = 16
    tokens: int = 32
    init: Init = "uniform"

    exact: ClassVar[bool] = True

    def __post_init__(self):
        check_settings(self, {"chain": 1}, {"init": get_args(Init)})
        check_settings(self, {"tokens": self.chain}, {})
        check_settings(self, {"window": self.tokens}, {})

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> LazyState:
        state = LazyState(**vars(open_window(model, sampling, seeds, self.window, self.init)))
        state.outdated = torch.ones(state.draft_probabilities.shape[:2], dtype=torch.bool, device=model.device)
        return state

    def step(self, state: LazyState) -> LazyState:
        model = state.model
        offsets, positions, live = window_positions(state)
        window, vocab_size = state.draft_probabilities.shape[1:]
        count = min(self.tokens, window)
        # The first `count` wanted drafts: whether one is evaluated must not depend on those after it.
        wanted = ((offsets < self.chain) | state.outdated) & live
        rank = wanted.long().cumsum(1) - 1
        evaluated = wanted & (rank < count)
        # Where in the window the evaluated drafts are [B, count]; behind it where there are fewer.
        place = torch.full((len(rank), count + 1), window, device=model.device)
        place = place.scatter(1, torch.where(evaluated, rank, count), offsets.expand_as(rank))[:, :count]

        last = model.num_tokens - 1
        drafts = state.tokens.gather(1, positions.clamp(max=last))
        at, x = (values.gather(1, place.clamp(max=window - 1)) for values in (positions.clamp(max=last), drafts))
        logits = model.forward(state.tokens.gather(1, at - 1), torch.where(place < window, at - 1, -1), state.cache)
        law = state.sampling.probabilities(logits, at)
        draft_probabilities = F.pad(state.draft_probabilities, (0, 0, 0, 1))
        index = place[..., None].expand(-1, -1, vocab_size)
        noise = uniforms(state.seeds, at, Purpose.VERIFY, state.forward_passes, 2)
        # What is decided must be evaluated with all that lies between it and the cursor.
        run = (place == offsets[:count]).long().cumprod(1).bool()
        tokens, _, leading = couple_window(law, draft_probabilities.gather(1, index), x, noise, run)
        accepted = torch.minimum(leading + 1, run.sum(1))
        write_tokens(state, at, place < window, tokens)
        state.draft_probabilities = draft_probabilities.scatter(1, index, law)[:, :window]
        changed = (state.tokens.gather(1, positions.clamp(max=last)) != drafts) & live
        outdated = (state.outdated & ~evaluated) | _after(changed, model.layout.columns)
        moved = offsets + accepted[:, None]
        # What enters the window was never evaluated.
        state.outdated = outdated.gather(1, moved.clamp(max=window - 1)) | (moved >= window)
        slide_window(state, accepted, self.init)
        return state


def _after(changed: torch.BoolTensor, columns: int) -> torch.BoolTensor:
    """Where a window [B, W] has a changed code to the left, above, above-left or above-right."""
    window = changed.shape[1]
    distances = {1, columns - 1, columns, columns + 1} & set(range(1, window))
    after = torch.zeros_like(changed)
    for distance in distances:
        after |= F.pad(changed, (distance, 0))[:, :window]
    return after
