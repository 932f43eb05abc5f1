"""Speculative Jacobi decoding with several drafts for the token at the cursor, each with a branch of its own."""

from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F

from ..kernels.coupling import couple
from .distribution import Sampling
from .interface import TokenModel, needs_tokens
from .noise import Purpose, uniforms
from .settings import check_settings
from .siblings import couple_siblings, sample_siblings
from .window import Init, WindowState, open_window, slide_window, window_positions


@dataclass(frozen=True)
class TreeJacobiDecoding:
    """Coupled speculative Jacobi decoding with a draft tree at the cursor; exact for every setting.

    Most drafts are rejected at the cursor, where the token before them has just changed. So the token there gets `width`
    drafts, sampled from its recorded distribution without replacement and verified in turn. Each further draft is followed by
    `depth` - 1 drafts of the window, so that when it is the one that is accepted, verification continues behind it in the same
    step.

    After SJD-PAC (https://arxiv.org/abs/2603.18599), whose published code samples the siblings from another distribution than
    the one they are verified by; here both are the recorded one. Its adaptive continuation is the coupled refresh.

    Attributes:
        window: drafts of the first branch, > `depth`. A step evaluates window + (width - 1) * depth tokens.
        width: drafts for the token at the cursor, >= 2.
        depth: tokens of each further branch, >= 1.
        init: the draft at a position that enters the window, as in `SpeculativeJacobiDecoding`.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int = 32
    width: int = 3
    depth: int = 4
    init: Init = "uniform"

    exact = True

    def __post_init__(self):
        check_settings(self, {"width": 2, "depth": 1}, {"init": get_args(Init)}, largest=1024)
        check_settings(self, {"window": self.depth + 1})

    def supports(self, model: TokenModel) -> str | None:
        return needs_tokens(model)

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> WindowState:
        scratch = (self.width - 1) * self.depth
        return open_window(WindowState, model, sampling, seeds, self.window, self.init, scratch=scratch)

    def step(self, state: WindowState) -> None:
        size, cursor, steps = state.model.num_tokens, state.cursor[:, None], state.steps
        offsets, positions, at, live = window_positions(state)
        drafts = state.tokens.gather(1, at)
        branches, depth = self.width - 1, min(self.depth, len(offsets) - 1)

        # The draft at the cursor is the first sample from its distribution; its siblings are sampled now.
        q = state.draft_probabilities[:, 0]
        noise = uniforms(state.seeds, at[:, :1], Purpose.SIBLING, steps, branches + self.width + 1)[:, 0]
        siblings = sample_siblings(q.scatter(1, drafts[:, :1], 0), noise[:, :branches])
        siblings = torch.cat([drafts[:, :1], siblings], dim=1)

        logits = self._evaluate(state, siblings[:, 1:], drafts, at, live, depth)
        p = state.probabilities(logits[:, :, : len(offsets)], at, live)
        chosen, which = couple_siblings(p[:, 0], q, siblings, noise[:, branches:])
        won = (which > 0)[:, None]
        # Behind a sibling that is accepted, the probabilities are those of its branch as far as it reaches.
        node = (which - 1).clamp(min=0)[:, None] * depth + offsets[:depth]
        index = (len(offsets) + node)[None, :, :, None].expand(len(logits), -1, -1, logits.shape[-1])
        behind = won & live[:, 1 : depth + 1]
        on_branch = state.probabilities(logits.gather(2, index), at[:, 1 : depth + 1], behind)
        p = torch.cat(
            [p[:, :1], torch.where(won[..., None], on_branch, p[:, 1 : depth + 1]), p[:, depth + 1 :]], dim=1
        )
        tokens, kept = couple(
            p, state.draft_probabilities, drafts, uniforms(state.seeds, at, Purpose.VERIFY, steps, 2)
        )
        tokens = torch.cat([chosen[:, None], tokens[:, 1:]], dim=1)
        kept = torch.cat([which[:, None] >= 0, kept[:, 1:]], dim=1)
        leading = (kept & live).long().cumprod(1).sum(1)
        limit = torch.where(won, depth + 1, live.sum(1, keepdim=True))[:, 0]
        accepted = torch.minimum(torch.minimum(leading + 1, limit), live.sum(1))
        # The last decided token is fed again in the next step.
        decided = won & (offsets[:depth] < accepted[:, None] - 1)
        state.cache.move(size + node, torch.where(decided, cursor + offsets[:depth], -1))
        state.write_tokens(positions, live, tokens)
        slide_window(state, accepted, p)

    def _evaluate(self, state, siblings, drafts, at, live, depth) -> torch.FloatTensor:
        """Logits [G, B, window + branches * depth, V]: behind the window's tokens, then behind those of each branch."""
        model, cursor = state.model, state.cursor[:, None]
        branches = siblings.shape[1]
        tokens = torch.cat([siblings[..., None], drafts[:, None, 1:depth].expand(-1, branches, -1)], dim=2).flatten(1)
        level = torch.arange(depth, device=model.device).repeat(branches)
        # A branch ends before the last position, which has none after it.
        grows = (siblings >= 0).repeat_interleave(depth, 1) & (cursor + level < model.num_tokens - 1)
        tokens = torch.cat([state.tokens.gather(1, at - 1), tokens.clamp(min=0)], dim=1)
        positions = torch.cat([torch.where(live, at - 1, -1), torch.where(grows, cursor + level, -1)], dim=1)
        scratch = model.num_tokens + torch.arange(branches * self.depth, device=model.device)
        slots = torch.cat([at - 1, scratch[: branches * depth].expand(len(cursor), -1)], dim=1)

        image = torch.arange(model.num_tokens, device=model.device)
        past = torch.cat([at - 1, (cursor - 1).expand(-1, branches * depth)], dim=1)
        branch = torch.arange(branches, device=model.device).repeat_interleave(depth)
        own = (branch[:, None] == branch) & (level <= level[:, None])
        own = F.pad(own, (0, len(scratch) - len(level), at.shape[1], 0)).expand(len(cursor), -1, -1)
        visible = torch.cat([image <= past[..., None], own], dim=-1)
        return model.forward(tokens, positions, state.cache, visible=visible, slots=slots)
