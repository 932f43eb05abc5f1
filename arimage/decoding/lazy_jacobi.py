"""Speculative Jacobi decoding that evaluates a far window only where something changed."""

from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F

from ..kernels.coupling import couple_window
from .distribution import Sampling
from .interface import TokenModel, needs_tokens
from .layout import Layout
from .noise import Purpose, uniforms
from .settings import check_settings
from .window import Init, WindowState, open_window, slide_window, window_positions


@dataclass
class LazyState(WindowState):
    """Adds to `WindowState`: `outdated` [B, W], where a neighbour's token changed since the draft was evaluated, and
    `neighbours` [1 or B, N, K], the ranks of each token's neighbours, N where there is none."""

    outdated: torch.BoolTensor
    neighbours: torch.LongTensor


@dataclass(frozen=True)
class LazyJacobiDecoding:
    """Coupled speculative Jacobi decoding that evaluates only the drafts that may change; exact for every setting.

    With coupled drafts (https://arxiv.org/abs/2510.24211) most drafts of a long window stay what they were. A step evaluates
    the first `chain` drafts after an image's cursor, which it may decide, and further ahead those drafts with a neighbour that
    changed since they were evaluated, `tokens` in all. So the drafts far ahead settle before the cursor arrives, for the cost
    of a window of `tokens`. Neighbours are the token generated before and, among those generated earlier, the tokens around
    it in the image (of a video, also the same place one frame earlier).

    Exact, since a draft is evaluated because of what changed before it, never because of its own value or of what comes after
    it, and is decided in a step that evaluates everything between it and the cursor.

    Attributes:
        window: drafts kept ahead, >= `tokens`.
        chain: drafts evaluated in every step, 1 .. `tokens`.
        tokens: drafts evaluated in a step at most.
        init: the draft at a position that enters the window, as in `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 64
    chain: int = 16
    tokens: int = 32
    init: Init = "uniform"

    exact = True

    def __post_init__(self):
        check_settings(self, {"chain": 1}, {"init": get_args(Init)})
        check_settings(self, {"tokens": self.chain})
        check_settings(self, {"window": self.tokens})

    def supports(self, model: TokenModel) -> str | None:
        return needs_tokens(model)

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> LazyState:
        outdated = torch.ones(len(seeds), min(self.window, model.num_tokens), dtype=torch.bool, device=model.device)
        return open_window(
            LazyState,
            model,
            sampling,
            seeds,
            self.window,
            self.init,
            outdated=outdated,
            neighbours=_earlier_neighbours(model.layout, model.device),
        )

    def step(self, state: LazyState) -> None:
        size = state.model.num_tokens
        offsets, positions, at, live = window_positions(state)
        window, vocab_size = state.draft_probabilities.shape[1:]
        count = min(self.tokens, window)
        # The first `count` wanted drafts: whether one is evaluated must not depend on those after it.
        wanted = ((offsets < self.chain) | state.outdated) & live
        rank = wanted.long().cumsum(1) - 1
        evaluated = wanted & (rank < count)
        # Where in the window the evaluated drafts are [B, count]; behind it where there are fewer.
        place = torch.full((len(rank), count + 1), window, device=rank.device)
        place = place.scatter(1, torch.where(evaluated, rank, count), offsets.expand_as(rank))[:, :count]
        used = place < window

        drafts = state.tokens.gather(1, at)
        queried, x = (values.gather(1, place.clamp(max=window - 1)) for values in (at, drafts))
        previous = state.tokens.gather(1, queried - 1)
        logits = state.model.forward(previous, torch.where(used, queried - 1, -1), state.cache)
        p = state.probabilities(logits, queried, used)
        recorded = F.pad(state.draft_probabilities, (0, 0, 0, 1))
        index = place[..., None].expand(-1, -1, vocab_size)
        noise = uniforms(state.seeds, queried, Purpose.VERIFY, state.steps, 2)
        # What is decided must be evaluated with all that lies between it and the cursor.
        run = (place == offsets[:count]).long().cumprod(1).bool()
        tokens, _, leading = couple_window(p, recorded.gather(1, index), x, noise, run)
        accepted = torch.minimum(leading + 1, run.sum(1))
        state.write_tokens(queried, used, tokens)

        changed = torch.zeros_like(state.decided_buffer)
        changed.scatter_(1, torch.where(live, at, size), (state.tokens.gather(1, at) != drafts) & live)
        changed[:, size] = False
        near = state.neighbours.expand(len(at), -1, -1).gather(
            1, at[..., None].expand(-1, -1, state.neighbours.shape[2])
        )
        disturbed = changed.gather(1, near.flatten(1)).view_as(near).any(2)
        outdated = (state.outdated & ~evaluated) | disturbed
        moved = offsets + accepted[:, None]
        entered = slide_window(state, accepted, recorded.scatter(1, index, p)[:, :window])
        # What enters the window was never evaluated.
        torch.logical_or(outdated.gather(1, moved.clamp(max=window - 1)), entered, out=state.outdated)


def _earlier_neighbours(layout: Layout, device: torch.device) -> torch.LongTensor:
    """The ranks [1 or B, N, K] of the tokens around each rank that are generated before it, N where there is none."""
    ranks = layout.expand(torch.arange(layout.num_tokens, device=device))
    offsets: list[tuple[int, ...]] = [
        (row, column) for row in (-1, 0, 1) for column in (-1, 0, 1) if (row, column) != (0, 0)
    ]
    if len(layout.shape) == 3:
        offsets.append((-1, 0, 0))
    around = torch.stack([ranks - 1, *(layout.neighbours(ranks, offset) for offset in offsets)], dim=-1)
    return torch.where((around >= 0) & (around < ranks[..., None]), around, layout.num_tokens)
