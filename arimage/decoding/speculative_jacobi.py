"""Speculative Jacobi decoding: draft a window, verify it in one pass, and let that same pass draft the next window."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from ..kernels.coupling import couple_window, sample
from .acceptance import Acceptance, ExactAcceptance, Keeps
from .adaptive_window import INTERVAL, AdaptiveWindow, pass_seconds
from .distribution import Sampling
from .interface import TokenModel
from .noise import Purpose, exponentials, uniforms
from .settings import check_settings
from .window import (
    Init,
    WindowState,
    open_window,
    resize_window,
    slide_window,
    window_positions,
    write_tokens,
)


Refresh = Literal["independent", "coupled", "gumbel"]


@dataclass
class JacobiState(WindowState):
    """Adds to `WindowState`: `keeps`, the test that decides drafts, and what chooses the window where nobody did."""

    keeps: Keeps = None
    adaptive: AdaptiveWindow | None = None


@dataclass(frozen=True)
class SpeculativeJacobiDecoding:
    """Speculative Jacobi decoding (https://arxiv.org/abs/2410.01699), exact unless `acceptance`, `relax` or `reuse` say not.

    A pass evaluates `window` drafts after an image's cursor. The leading drafts that survive verification are decided, the
    first that does not is replaced by a draw from the residual law and decided too. The other drafts are drawn anew from
    the laws just computed. Every image has a cursor of its own, so none waits for another.

    A relaxed test decides drafts; it has no say in how the others are drawn anew. So a draft follows its recorded law
    whatever the test, and where the law of one code, given those before it, is off by a total variation of at most e, that
    of an image of N codes is off by at most 1 - (1 - e) ** (N - 1).

    Attributes:
        window: drafts a pass, >= 1; 1 is autoregressive decoding. "auto" takes the one that decides the most codes a second:
            what a pass costs is measured in the first call of a model with a batch size, what it decides in every call.
            Exact like any other, but then the same seed may draw another image on another machine or in another batch.
        refresh: how the drafts that were not decided are drawn anew: "independent" of the old ones (the original method);
            "coupled" to them, so that as many as possible stay and the next pass verifies what it saw before
            (https://arxiv.org/abs/2510.24211; its maximal coupling); or by "gumbel" noise fixed for each position (its
            other coupling).
        init: the draft at a position that enters the window: a code drawn from the "uniform" law, or a copy of the code to
            the "left" or "above" it.
        acceptance: the test of a draft, exact, by groups of codes or by neighbours in the codebook.
        relax: what the probability to keep a draft is multiplied by, >= 1; 1 is exact with an exact acceptance, where
            e = 1 - 1 / relax (COOL-SD, https://arxiv.org/abs/2601.09212, with a constant factor).
        reuse: the drafts not decided stay where their probability is more than `reuse` times what it was, and are drawn anew
            as `refresh` says elsewhere (SJD++, https://arxiv.org/abs/2512.07503, with the independent refresh). Not exact,
            without a bound: what stays does not follow the law that is recorded for it. None is off.

    Raises:
        ValueError: if a setting is not among these.
    """

    window: int | Literal["auto"] = 32
    refresh: Refresh = "coupled"
    init: Init = "uniform"
    acceptance: Acceptance = field(default_factory=ExactAcceptance)
    relax: float = 1.0
    reuse: float | None = None

    def __post_init__(self):
        check_settings(
            self,
            {} if self.window == "auto" else {"window": 1},
            {"refresh": get_args(Refresh), "init": get_args(Init)},
        )
        if not isinstance(self.acceptance, Acceptance):
            choices = ", ".join(f"{choice.__name__}()" for choice in get_args(Acceptance))
            raise ValueError(f"acceptance is {self.acceptance!r}: choose among {choices}")
        if not self.relax >= 1:
            raise ValueError(f"relax is {self.relax!r}: give a factor of at least 1")
        if self.reuse is not None and not self.reuse >= 0:
            raise ValueError(f"reuse is {self.reuse!r}: give a ratio of at least 0, or None")

    @property
    def exact(self) -> bool:
        return self.acceptance.exact and self.relax == 1 and self.reuse is None

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> JacobiState:
        keeps, adaptive, window = self.acceptance.bind(model), None, self.window
        if window == "auto":
            adaptive = AdaptiveWindow(self._seconds(model, sampling, seeds), model.num_tokens)
            window = adaptive.window
        state = open_window(model, sampling, seeds, window, self.init)
        return JacobiState(**vars(state), keeps=keeps, adaptive=adaptive)

    def _seconds(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> dict[int, float]:
        def run(size: int) -> Callable[[], None]:
            fixed = replace(self, window=size)
            state = fixed.start(model, sampling, seeds)
            return lambda: fixed.step(state)

        return pass_seconds(model, len(seeds), run)

    def step(self, state: JacobiState) -> JacobiState:
        offsets, positions, live = window_positions(state)
        at = positions.clamp(max=state.model.num_tokens - 1)
        previous = state.tokens.gather(1, (at - 1).clamp(min=0))
        logits = state.model.forward(previous, torch.where(live, positions - 1, -1), state.cache)
        law = state.sampling.probabilities(logits, at)
        drafts = state.tokens.gather(1, at)
        passes = state.forward_passes
        noise = uniforms(state.seeds, at, Purpose.VERIFY, passes, 2)
        verified, kept, leading = couple_window(law, state.draft_probabilities, drafts, noise, live)
        if self.relax > 1 or not self.acceptance.exact:
            kept = state.keeps(law, state.draft_probabilities, drafts, noise[..., 0] / self.relax)
            leading = (kept & live).long().cumprod(1).sum(1)
        accepted = torch.minimum(leading + 1, live.sum(1))
        if self.refresh == "coupled":
            redrawn = verified
        elif self.refresh == "independent":
            redrawn = sample(law, uniforms(state.seeds, at, Purpose.REFRESH, passes, 1)[..., 0])
        else:
            # The largest of p / e is that of log p plus Gumbel noise.
            race = exponentials(state.seeds, at, Purpose.GUMBEL, 0, law.shape[-1])
            redrawn = (law / race).argmax(-1)
        if self.reuse is not None:
            now, before = (laws.gather(-1, drafts[..., None]).squeeze(-1) for laws in (law, state.draft_probabilities))
            redrawn = torch.where(now > self.reuse * before, drafts, redrawn)
        decided = torch.where(kept, drafts, verified)
        write_tokens(state, positions, live, torch.where(offsets < accepted[:, None], decided, redrawn))
        state.draft_probabilities = law
        running = ~state.finished
        slide_window(state, accepted, self.init)
        if state.adaptive is not None:
            state.adaptive.observe(leading, running)
            if state.forward_passes % INTERVAL == 0:
                resize_window(state, state.adaptive.choose(state.cursor), self.init)
        return state
