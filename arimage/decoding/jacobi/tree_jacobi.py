"""Speculative Jacobi decoding with several drafts for the token at the cursor, each followed by its own branch."""

from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F

from ...kernels.coupling import couple_at
from ...kernels.siblings import couple_siblings, sample_siblings
from ..contract.distribution import Sampling
from ..contract.layout import Layout
from ..contract.models import TokenModel
from ..contract.noise import Purpose, uniforms
from ..contract.settings import check_settings
from ..contract.supports import DecodingMethod, Needs
from .window import Init, WindowState, decided_end, needs_of_init, open_window, slide_window


@dataclass
class TreeState(WindowState):
    """Adds to `WindowState` constants of the W + S tokens that a step feeds: the window, then the branches one after
    another.

    Attributes:
        past: int64 [B, W + S], how many positions after the last decided token a token of a branch is; 0 in the
            window.
        slots: int64 [B, W + S], the cache slot of a token of a branch; 0 in the window.
        sibling: int64 [B, W + S], the index of the draft at the cursor that a branch begins with; 0 in the window.
        first: bool [B, W + S], the first tokens of the branches.
        own: bool [B, W + S, S], the tokens of branches that a token attends to.
    """

    past: torch.LongTensor
    slots: torch.LongTensor
    sibling: torch.LongTensor
    first: torch.BoolTensor
    own: torch.BoolTensor


@dataclass(frozen=True)
class TreeJacobiDecoding(DecodingMethod):
    """Coupled speculative Jacobi decoding with a draft tree at the cursor; exact for every setting.

    Most rejections happen at the cursor, where the previous token has just changed. So the token there gets `width`
    drafts, sampled from its recorded distribution without replacement and verified one after another. Each additional
    draft is followed by `depth` - 1 drafts of the window, so that if it is accepted, verification continues after it
    in the same step.

    Based on SJD-PAC (https://arxiv.org/abs/2603.18599). Its published code samples the siblings from one distribution
    and verifies them with another; here both are the recorded one. Its adaptive continuation corresponds to the
    coupled refresh.

    Attributes:
        window: drafts of the first branch, > `depth`. A step evaluates window + (width - 1) * depth tokens.
        width: drafts for the token at the cursor, >= 2.
        depth: tokens of each additional branch, >= 1.
        init: the draft at a position that enters the window, as in `SpeculativeJacobiDecoding`.
    """

    window: int = 32
    width: int = 3
    depth: int = 4
    init: Init = "uniform"

    exact = True

    def __post_init__(self):
        check_settings(self, {"width": 2, "depth": 1}, {"init": get_args(Init)}, largest=1024)
        check_settings(self, {"window": self.depth + 1})

    @property
    def needs(self) -> Needs:
        return {"tokens": ("single tokens", *needs_of_init(self.init))}

    def positions(self, layout: Layout) -> int | None:
        window = min(self.window, layout.num_tokens)
        return window + (self.width - 1) * self._depth(window)

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> TreeState:
        window = min(self.window, model.num_tokens)
        depth = self._depth(window)
        past = torch.arange(1, depth + 1, device=model.device).repeat(self.width - 1)
        sibling = torch.arange(1, self.width, device=model.device).repeat_interleave(depth)
        own = (sibling[:, None] == sibling) & (past <= past[:, None])
        slots = model.num_tokens + torch.arange(len(past), device=model.device)

        def per_image(values: torch.Tensor) -> torch.Tensor:
            values = F.pad(values, (*[0, 0] * (values.ndim - 1), window, 0))
            return values.repeat(len(seeds), *[1] * values.ndim)

        return open_window(
            TreeState,
            model,
            sampling,
            seeds,
            window,
            self.init,
            scratch=len(past),
            past=per_image(past),
            slots=per_image(slots),
            sibling=per_image(sibling),
            first=per_image(past == 1),
            own=per_image(own),
        )

    def _depth(self, window: int) -> int:
        """The number of tokens of a branch."""
        return min(self.depth, window - 1)

    def step(self, state: TreeState) -> None:
        size, window, depth = state.model.num_tokens, state.window, self._depth(state.window)
        cursor, last = state.cursor[:, None], state.cursor[:, None] - 1
        images = torch.arange(len(cursor), device=cursor.device)[:, None]
        # The draft at the cursor is the first sample from its distribution; its siblings are sampled here.
        head = last % window
        q = state.draft_probabilities[images, head][:, 0]
        noise = uniforms(state.seeds, cursor, state.steps, Purpose.SIBLING, 2 * self.width)[:, 0]
        siblings = sample_siblings(q, noise[:, : self.width - 1], state.token_buffer.gather(1, cursor)[:, 0])

        counting = torch.arange(size, device=cursor.device)
        ranks, p = self._evaluate(state, last, siblings, counting)
        chosen, which = couple_siblings(p[images, head][:, 0], q, siblings, noise[:, self.width - 1 :])
        won = (which > 0)[:, None]
        # After an accepted sibling, the probabilities are those of its branch, as far as the branch goes.
        fed = ranks[:, window : window + depth]
        rows = counting[:window]
        branch, behind = rows[window - depth :] + which.clamp(min=1)[:, None] * depth, fed % window
        p = p[images, rows.expand(len(cursor), -1).scatter(1, behind, torch.where(won, branch, behind))]
        positions, drafts = state.positions, state.token_buffer.gather(1, state.positions)
        of_step = state.seeds, positions, state.steps, Purpose.VERIFY
        tokens, kept, noise = couple_at(p, state.draft_probabilities, drafts, *of_step)
        tokens.scatter_(1, head, chosen[:, None])
        kept.scatter_(1, head, which[:, None] >= 0)
        reach = torch.add(last + window, won, alpha=depth + 1 - window)
        end = decided_end(state, positions, kept, reach)
        # The last decided token is fed again in the next step.
        moved = (end[:, None] - 1) * won
        state.cache.move(branch + (size - window), fed.masked_fill(fed >= moved, -1))
        state.token_buffer.scatter_(1, positions, tokens)
        state.advance(end)
        slide_window(state, end, p, noise[..., 2])

    def _evaluate(self, state, last, siblings, image) -> tuple[torch.LongTensor, torch.FloatTensor]:
        """The ranks [B, W + S] of the tokens that are fed, and the probabilities [B, W + S, V] of the tokens after
        them."""
        size = state.model.num_tokens
        ranks = torch.cat([state.positions - 1, last + state.past[:, state.window :]], dim=1)
        sibling = siblings.gather(1, state.sibling)
        tokens = torch.where(state.first, sibling, state.token_buffer.gather(1, ranks))
        # A branch ends before the last position, which has no successor.
        ended = (ranks >= size - 1) | (sibling < 0)
        visible = torch.cat([image <= (ranks - state.past)[..., None], state.own], dim=-1)
        logits = state.model.forward(
            tokens,
            ranks.masked_fill(ended, -1),
            state.cache,
            visible=visible,
            slots=torch.maximum(ranks, state.slots),
        )
        return ranks, state.probabilities(logits, ranks + 1, ended)
