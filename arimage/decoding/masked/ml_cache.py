"""ML-Cache: masked decoding in which many forward passes evaluate only the places of which the model is least sure."""

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch

from ..contract.distribution import Sampling
from ..contract.models import MaskedTokenModel
from ..contract.settings import check_number, check_settings
from .confidence import ConfidenceDecoding
from .halton import HaltonDecoding
from .tokens import MaskedTokenState, SampledDecoding


Pass = Literal["full", "keeping", "partial"]


@dataclass
class CachedState(MaskedTokenState):
    """Adds to `MaskedTokenState`: `passes`, what each step evaluates: all rows ("full"), all of which it keeps what
    further steps need ("keeping"), or few ("partial"). `cache` is the context of the model, None if no step is
    partial."""

    renewed = MaskedTokenState.renewed | {"passes"}

    passes: tuple[Pass, ...] = field(default=(), kw_only=True)

    @property
    def step_variant(self):
        return None if self.over else (self.passes[self.taken], super().step_variant)


@dataclass(frozen=True)
class MLCache(SampledDecoding):
    """Generate masked tokens as the `sampler` does, but with cheaper forward passes, as in Lumina-DiMOO
    (https://arxiv.org/abs/2510.06308). Not exact, and without a bound.

    A full step evaluates all rows of the model, and keeps the keys and values of all layers and the logits. A partial
    step evaluates a share of `1 - ratio` of the rows: those whose largest logit is lowest, of each branch of guidance
    its own, whether they are decided, masked, or belong to a text. Their keys, values and logits replace those that
    were kept; all other rows stay as they are, so that many tokens are sampled from older logits, and a decided token
    is seen by others only once its row is evaluated again. Rows of which a model keeps no logits are evaluated in
    every step.

    The rows are those up to the quantile of `1 - ratio`, as in the released code, which takes all of equal ones at the
    end, where this takes the first. With `interval` 1 the tokens are those of the sampler.

    Attributes:
        steps: all steps, full and partial; None takes those of the sampler.
        warmup: the steps up to this share of all steps are full, in [0, 1).
        interval: from there on every so many steps one is full, >= 1.
        ratio: the share of rows that a partial step does not evaluate, between 0 and 1.
        sampler: which tokens a step decides.
    """

    steps: int | None = None
    warmup: float = 0.3
    interval: int = 5
    ratio: float = 0.9
    sampler: HaltonDecoding | ConfidenceDecoding = field(default_factory=ConfidenceDecoding)

    exact = False
    needs = {"masked_tokens": ()}

    def __post_init__(self):
        check_settings(self, {"steps": 1, "interval": 1})
        for name, least in (("warmup", 0), ("ratio", 1e-6)):
            check_number(self, name, least, 1 - 1e-6)
        super().__post_init__()

    def misfit(self, model: MaskedTokenModel) -> str | None:
        return self._sampler.misfit(model)

    def is_full(self, step: int, steps: int) -> bool:
        """Whether this one of so many steps is full."""
        # Their product in float64, as in the released code.
        warmup = int(steps * self.warmup)
        return step <= warmup or (step - warmup) % self.interval == 0

    def start(self, model: MaskedTokenModel, sampling: Sampling, seeds: torch.LongTensor) -> CachedState:
        """Decide the first set."""
        state = self._sampler.open(model, sampling, seeds, CachedState)
        self._sampler.plan(state)
        steps = self.num_steps(model)
        full = [self.is_full(step, steps) for step in range(state.num_steps)] + [True]
        state.passes = tuple(
            "partial" if not now else "full" if then else "keeping" for now, then in zip(full, full[1:], strict=False)
        )
        if "partial" in state.passes:
            state.cache = model.open_context(len(seeds), logits=True)
        self.step(state)
        return state

    def step(self, state: CachedState) -> None:
        if state.over:
            return
        evaluate = partial(state.model.forward, state.tokens)
        if (now := state.passes[state.taken]) != "full":
            evaluate = partial(evaluate, rows=self._rows(state) if now == "partial" else None, context=state.cache)
        self._sampler.decide(state, evaluate)

    def _rows(self, state: CachedState) -> torch.LongTensor:
        """The rows [G, B, M] that a partial step evaluates."""
        nowhere, device = state.model.num_rows, state.seeds.device
        scores = state.cache.logits.amax(-1).float()
        length = scores.shape[-1]
        # Rows that an image or a branch does not have are infinite. In float32, as in `torch.quantile`.
        there = (scores < torch.inf).sum(-1)
        count = ((there - 1).float() * (1 - self.ratio)).long() + 1
        most = int(np.float32(length - 1) * np.float32(1 - self.ratio)) + 1
        # Stable, so that the rest of a batch does not matter.
        rows = scores.argsort(dim=-1, stable=True)[..., :most]
        rows = torch.where(torch.arange(most, device=device) < count[..., None], rows, nowhere)
        others = torch.arange(length, nowhere, device=device)
        return torch.cat([rows, others.expand(*rows.shape[:2], -1)], dim=-1)
