"""Speculative Jacobi decoding that evaluates a far window only where something changed."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from ..kernels.coupling import couple_window
from .contract.distribution import Sampling
from .contract.layout import Layout
from .contract.models import TokenModel
from .contract.noise import Purpose, uniforms
from .contract.settings import check_settings
from .contract.supports import DecodingMethod, Needs
from .window import Init, WindowState, needs_of_init, open_window, slide_window


@dataclass
class LazyState(WindowState):
    """Adds to `WindowState`: `outdated` [B, N + W], the positions whose draft was never evaluated or had a neighbour's
    token changed since, `later` [B, N + W, K], the ranks of which each position is a neighbour, N + W - 1 where there
    is none, and `chain` [B, 1], how many drafts after the cursor the next step evaluates.
    """

    outdated: torch.BoolTensor
    later: torch.LongTensor
    chain: torch.LongTensor


@dataclass(frozen=True)
class LazyJacobiDecoding(DecodingMethod):
    """Coupled speculative Jacobi decoding that evaluates only the drafts that may change; exact for every setting.

    With coupled drafts (https://arxiv.org/abs/2510.24211) most drafts of a long window stay what they were. A step
    evaluates the first `chain` drafts after an image's cursor, which it may decide, and further ahead those drafts
    with a neighbour that changed since they were evaluated, `tokens` in all. So the drafts far ahead settle before the
    cursor arrives, for the cost of a window of `tokens`. Neighbours are the token generated before and, among those
    generated earlier, the tokens around it in the image (of a video, also the same place one frame earlier).

    Exact, since a draft is evaluated because of what changed before it, never because of its own value or of what
    comes after it, and is decided in a step that evaluates everything between it and the cursor.

    Attributes:
        window: drafts kept ahead, >= `tokens`.
        chain: drafts evaluated in every step, 1 .. `tokens`, and so the most that it surely may decide. "auto" is
            twice as many as the last step decided, at least a quarter of `tokens`: for videos, where a step may decide
            far more than 16.
        tokens: drafts evaluated in a step at most.
        init: the draft at a position that enters the window, as in `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 64
    chain: int | Literal["auto"] = 16
    tokens: int = 32
    init: Init = "uniform"

    exact = True

    def __post_init__(self):
        check_settings(self, {} if self.chain == "auto" else {"chain": 1}, {"init": get_args(Init)})
        check_settings(self, {"tokens": 1 if self.chain == "auto" else self.chain})
        check_settings(self, {"window": self.tokens})

    @property
    def needs(self) -> Needs:
        return {"tokens": ("single tokens", *needs_of_init(self.init))}

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> LazyState:
        size = model.num_tokens + min(self.window, model.num_tokens)
        return open_window(
            LazyState,
            model,
            sampling,
            seeds,
            self.window,
            self.init,
            outdated=torch.ones(len(seeds), size, dtype=torch.bool, device=model.device),
            later=_later_neighbours(model.layout, len(seeds), size, model.device),
            chain=torch.full_like(seeds, self._least)[:, None],
        )

    @property
    def _least(self) -> int:
        return max(self.tokens // 4, 1) if self.chain == "auto" else self.chain

    def step(self, state: LazyState) -> None:
        size, cursor, window = state.model.num_tokens, state.cursor[:, None], state.window
        count, behind = min(self.tokens, window), size + window - 1
        # The first `count` wanted drafts: whether one is evaluated must not depend on those after it.
        wanted = state.outdated.gather(1, state.positions) | (state.positions < cursor + state.chain)
        queried, slots = (values[:, :count] for values in torch.where(wanted, state.positions, behind).sort(1))
        used, before = queried < size, queried - 1
        previous, x = state.token_buffer.gather(1, before), state.token_buffer.gather(1, queried)
        logits = state.model.forward(previous, torch.where(used, before, -1), state.cache)
        p = state.probabilities(logits, queried, used)
        images = torch.arange(len(slots), device=slots.device)[:, None]
        q = state.draft_probabilities[images, slots]
        noise = uniforms(state.seeds, queried, Purpose.VERIFY, state.steps, 2)
        # What is decided must be evaluated with all that lies between it and the cursor.
        run = used & (queried == cursor + torch.arange(count, device=slots.device))
        y, _, leading = couple_window(p, q, x, noise, run)
        end = state.cursor + torch.minimum(leading + 1, run.sum(1))
        state.token_buffer.scatter_(1, queried, y)
        if self.chain == "auto":
            state.chain.copy_((2 * (end[:, None] - cursor)).clamp(self._least, self.tokens))

        state.outdated.scatter_(1, queried, False)
        later = state.later.gather(1, queried[..., None].expand(-1, -1, state.later.shape[2]))
        state.outdated.scatter_(1, torch.where((y != x)[..., None], later, behind).flatten(1), True)
        state.draft_probabilities[images, slots] = torch.where(used[..., None], p, q)
        slide_window(state, end, state.draft_probabilities)


def _later_neighbours(layout: Layout, batch_size: int, size: int, device: torch.device) -> torch.LongTensor:
    """The ranks [B, `size`, K] of the tokens around each rank that are generated after it; `size` - 1 where there is
    none, and behind the image."""
    ranks = torch.arange(layout.num_tokens, device=device).repeat(batch_size, 1)
    offsets: list[tuple[int, ...]] = [
        (row, column) for row in (-1, 0, 1) for column in (-1, 0, 1) if (row, column) != (0, 0)
    ]
    if len(layout.shape) == 3:
        offsets.append((1, 0, 0))
    around = torch.stack([ranks + 1, *(layout.neighbours(ranks, offset) for offset in offsets)], dim=-1)
    later = torch.where(around > ranks[..., None], around, size - 1)
    return F.pad(later, (0, 0, 0, size - layout.num_tokens), value=size - 1)
