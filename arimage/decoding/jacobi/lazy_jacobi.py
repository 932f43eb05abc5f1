"""Speculative Jacobi decoding that evaluates drafts far ahead only where something changed."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from ...kernels.coupling import couple_window
from ..contract.distribution import Sampling
from ..contract.layout import Layout
from ..contract.models import TokenModel
from ..contract.noise import Purpose, uniforms
from ..contract.settings import check_settings
from ..contract.supports import DecodingMethod, Needs
from .window import Init, WindowState, needs_of_init, open_window, slide_window


@dataclass
class LazyState(WindowState):
    """Adds to `WindowState`: `outdated` [B, N + W], the positions whose draft was never evaluated, or a neighbour of
    which has changed since; `later` [B, N + W, K], the later ranks that have each position as a neighbour (N + W - 1
    where there is none); and `chain` [B, 1], how many drafts after the cursor the next step evaluates.
    """

    outdated: torch.BoolTensor
    later: torch.LongTensor
    chain: torch.LongTensor


@dataclass(frozen=True)
class LazyJacobiDecoding(DecodingMethod):
    """Coupled speculative Jacobi decoding that evaluates only the drafts that may change; exact for every setting.

    With coupled drafts (https://arxiv.org/abs/2510.24211) most drafts of a long window do not change from step to
    step. A step evaluates the first `chain` drafts after an image's cursor, which it may decide, and further ahead
    those with a neighbour that has changed since they were evaluated, at most `tokens` in all. The neighbours of a
    draft are the previous token and the tokens around it in the image that are generated earlier (in a video, also the
    same place one frame earlier).

    This is exact for two reasons: whether a draft is evaluated depends only on changes before it, never on its own
    value or on later ones; and the step that decides a draft evaluates everything between the cursor and the draft.

    Attributes:
        window: drafts kept ahead, >= `tokens`.
        chain: drafts after the cursor that every step evaluates, 1 .. `tokens`; a step can always decide up to this
            many. "auto" is twice the number that the last step decided, at least a quarter of `tokens`: useful for
            videos, where a step may decide far more than 16.
        tokens: the largest number of drafts evaluated per step.
        init: the draft at a position that enters the window, as in `SpeculativeJacobiDecoding`.
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

    def positions(self, layout: Layout) -> int | None:
        return min(self.tokens, layout.num_tokens)

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
        # The first `count` candidates: whether a draft is evaluated must not depend on later drafts.
        wanted = state.outdated.gather(1, state.positions) | (state.positions < cursor + state.chain)
        queried, slots = (values[:, :count] for values in torch.where(wanted, state.positions, behind).sort(1))
        ended, before = queried >= size, queried - 1
        previous, x = state.token_buffer.gather(1, before), state.token_buffer.gather(1, queried)
        fed = before.masked_fill_(ended, -1)
        logits = state.model.forward(previous, fed, state.cache, slots=fed)
        p = state.probabilities(logits, queried, ended)
        images = torch.arange(len(slots), device=slots.device)[:, None]
        q = state.draft_probabilities[images, slots]
        noise = uniforms(state.seeds, queried, state.steps, Purpose.VERIFY, 2)
        # A draft may only be decided if everything between the cursor and the draft is evaluated too.
        run = (queried == cursor + torch.arange(count, device=slots.device)) > ended
        y, leading = couple_window(p, q, x, noise, run)
        end = state.cursor + torch.minimum(leading + 1, run.sum(1))
        state.token_buffer.scatter_(1, queried, y)
        if self.chain == "auto":
            state.chain.copy_((2 * (end[:, None] - cursor)).clamp(self._least, self.tokens))

        state.outdated.scatter_(1, queried, False)
        later = state.later.gather(1, queried[..., None].expand(-1, -1, state.later.shape[2]))
        state.outdated.scatter_(1, torch.where((y != x)[..., None], later, behind).flatten(1), True)
        state.draft_probabilities[images, slots] = torch.where(ended[..., None], q, p)
        state.advance(end)
        slide_window(state, end)


def _later_neighbours(layout: Layout, batch_size: int, size: int, device: torch.device) -> torch.LongTensor:
    """The ranks [B, `size`, K] of the tokens around each rank that are generated after it; `size` - 1 where there is
    none, and after the end of the image."""
    ranks = torch.arange(layout.num_tokens, device=device).repeat(batch_size, 1)
    offsets: list[tuple[int, ...]] = [
        (row, column) for row in (-1, 0, 1) for column in (-1, 0, 1) if (row, column) != (0, 0)
    ]
    if len(layout.shape) == 3:
        offsets.append((1, 0, 0))
    around = torch.stack([ranks + 1, *(layout.neighbours(ranks, offset) for offset in offsets)], dim=-1)
    later = torch.where(around > ranks[..., None], around, size - 1)
    return F.pad(later, (0, 0, 0, size - layout.num_tokens), value=size - 1)
