"""Speculative Jacobi decoding: draft a window, verify it in one pass, and let that same pass draft the next window."""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from .coupling import couple, draw
from .interface import TokenModel
from .law import Sampling
from .noise import Purpose, exponentials, uniforms
from .window import Init, WindowState, open_window, slide_window, window_positions, write_tokens


Refresh = Literal["independent", "coupled", "gumbel"]


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
        return open_window(model, sampling, seeds, self.window, self.init)

    def step(self, state: WindowState) -> WindowState:
        offsets, positions, live = window_positions(state)
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
        write_tokens(state, positions, live, torch.where(offsets < accepted[:, None], verified, redrawn))
        state.draft_law = law
        slide_window(state, accepted, self.init)
        return state
