"""Confidence decoding: masked tokens in the order in which the model is certain of them, as in MaskGIT."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch

from ...kernels.coupling import sample_at
from ..contract.distribution import Sampling, by_lane
from ..contract.models import MaskedTokenModel
from ..contract.noise import Purpose, exponentials
from ..contract.settings import check_number, check_settings
from .halton import too_many_steps
from .sets import MULTIPLE, TokenSet, has_few_sizes, open_sets, rounded_up
from .tokens import Evaluate, MaskedTokenState, TokenSampler, given_tokens


Schedule = Literal["arccos", "cosine", "linear", "square", "root", "maskgit"]
Slope = Literal["linear", "constant"]

_KNOWN = {
    "arccos": lambda share: 1 - np.arccos(share) / np.float32(np.pi / 2),
    "cosine": lambda share: 1 - np.cos(np.float32(np.pi) * share / 2),
    "linear": lambda share: share,
    "square": lambda share: share**2,
    "root": np.sqrt,
}


@dataclass(frozen=True)
class RatedSet(TokenSet):
    """A `TokenSet` that is chosen among `rated` tokens."""

    rated: int = 0


@dataclass(frozen=True)
class ConfidenceDecoding(TokenSampler):
    """Generate sets of masked tokens, first those that the model is most certain of, as in MaskGIT
    (https://arxiv.org/abs/2202.04200). A step samples a token at every masked place, rates each by the logarithm of
    its probability plus Gumbel noise, and decides those with the highest ratings. One forward pass per step.

    It is exact in the sense that it samples from the distribution that the model defines for these settings; each
    choice of settings defines another one. The rating takes the probability before temperature, top-k, top-p and
    min-p, and its noise is multiplied by the temperature.

    Settings that are None are those that the model was published with.

    Attributes:
        steps: the number of forward passes, at most as many as an image has tokens.
        schedule: how many tokens are decided after step i of S: "arccos", "cosine", "linear", "square" and "root" are
            functions of i / (S - 1), as in Halton-MaskGIT, where the first step decides one token. With "maskgit",
            cos(pi / 2 (i + 1) / S) of the tokens are left, as in MaskGIT's paper.
        noise: factor on the Gumbel noise, >= 0.
        noise_schedule: whether the noise falls to 0 until the last step ("linear") or stays ("constant").
        guidance_schedule: whether guidance grows from a scale of 1 to `guidance_scale` in the last step ("linear") or
            stays ("constant").
        sharpness: a factor on the logits, above 0.
        redraw_known: whether each step samples the tokens again that earlier steps have decided, as the authors of
            Halton-MaskGIT released it. Given tokens of edited images stay in any case.
        max_gumbel: at most this is added to the logarithm of a probability before the token with the largest sum is
            taken, >= 0: the Gumbel noise whose cut makes probable tokens more probable. None does not cut it, which is
            exact. 5.54 comes near the images of Lumina-DiMOO's authors, who sample in bfloat16, but does not round as
            they do.
    """

    steps: int | None = None
    schedule: Schedule | None = None
    noise: float | None = None
    noise_schedule: Slope | None = None
    guidance_schedule: Slope | None = None
    sharpness: float = 1.0
    redraw_known: bool = False
    max_gumbel: float | None = None

    def __post_init__(self):
        slopes = (None, *get_args(Slope))
        choices = {"schedule": (None, *get_args(Schedule)), "noise_schedule": slopes, "guidance_schedule": slopes}
        check_settings(self, {"steps": 1}, choices={**choices, "redraw_known": (False, True)})
        check_number(self, "sharpness", 1e-6)
        if self.noise is not None:
            check_number(self, "noise", 0)
        if self.max_gumbel is not None:
            check_number(self, "max_gumbel", 0)

    @property
    def exact(self) -> bool:
        return self.max_gumbel is None

    def misfit(self, model: MaskedTokenModel) -> str | None:
        # With "maskgit" each step decides at least one token, so that further steps are left out.
        most = None if self._schedule(model) == "maskgit" else self.steps
        return too_many_steps(most, model)

    def num_steps(self, model: MaskedTokenModel) -> int:
        steps = self.steps or model.published.steps
        return steps if self._schedule(model) == "maskgit" else min(steps, model.num_tokens)

    def _schedule(self, model: MaskedTokenModel) -> str:
        return self.schedule or model.published.schedule

    def open(self, model: MaskedTokenModel, sampling: Sampling, seeds: torch.LongTensor, state_class: type) -> Any:
        order = torch.arange(model.num_tokens, device=seeds.device).repeat(len(seeds), 1)
        steps, schedule = self.num_steps(model), self._schedule(model)
        state = open_sets(
            model,
            sampling,
            seeds,
            state_class,
            order,
            given_tokens(sampling),
            lambda count: _counts(count, steps, schedule),
            few_sizes=has_few_sizes(seeds),
        )
        state.give(sampling)
        return state

    def plan(self, state: MaskedTokenState) -> None:
        """Find how many tokens each step rates."""
        size, schedules, rated, stop = state.model.num_tokens, state.schedules, [], state.num_steps
        for step in reversed(range(state.num_steps)):
            # A partial step rates what is left of its group.
            partial = state.sets[step].known > 0
            rated.append(max(row[step] - (row[stop] if partial else 0) for row in schedules))
            stop = stop if partial else step
        rated.reverse()
        if self.redraw_known:
            rated = [size] * len(rated)
        if has_few_sizes(state.seeds):
            rated = [rounded_up(number, MULTIPLE, size) for number in rated]
        state.sets = [RatedSet(**vars(each), rated=number) for each, number in zip(state.sets, rated, strict=True)]

    def decide(self, state: MaskedTokenState, evaluate: Evaluate, last: torch.LongTensor | None = None) -> None:
        model, sampling, each = state.model, state.sampling, state.sets[state.taken]
        assert isinstance(each, RatedSet)
        size, device = model.num_tokens, state.seeds.device
        before, after = state.undecided
        unrated = torch.zeros_like(before) if last is None else last
        ranks = unrated[:, None] + torch.arange(each.rated, device=device)
        places = state.order.gather(1, ranks.clamp(max=size - 1))
        masked, given = ranks < before[:, None], given_tokens(sampling)
        sampled = masked
        if self.redraw_known:
            sampled = torch.ones_like(masked) if given is None else ~given.gather(1, places)
        logits = evaluate(torch.where(sampled, places, size))
        tokens, ratings = self._sample(state, logits, places, sampled)
        resampled = torch.zeros_like(state.token_buffer).scatter_(1, torch.where(sampled, places, size), tokens)

        # Places that are decided come last, in the order that they had; those that are not rated come first.
        keys = ratings.new_full((len(ratings), size + 1), torch.inf)
        keys.masked_fill_(torch.arange(size + 1, device=device) < unrated[:, None], -torch.inf)
        keys.scatter_(1, torch.where(masked, ranks, size), ratings)
        state.order.copy_(state.order.gather(1, keys[:, :size].argsort(dim=1, stable=True)))
        if self.redraw_known:
            known = state.decided if given is None else state.decided & ~given
            state.tokens.copy_(torch.where(known, resampled[:, :size], state.tokens))
        places, live = state.next_set(before, after)
        state.decide(places, live, resampled.gather(1, places))

    def _sample(
        self, state: MaskedTokenState, logits: torch.Tensor, places: torch.LongTensor, sampled: torch.BoolTensor
    ) -> tuple[torch.LongTensor, torch.FloatTensor]:
        """Tokens and their ratings [B, Q] at `places` [B, Q] from logits [G, B, Q, V]."""
        model, sampling, steps = state.model, state.sampling, state.steps
        published = model.published
        share = steps.float() / max(self.num_steps(model) - 1, 1)
        if (self.guidance_schedule or published.guidance_schedule) == "linear" and len(logits) == 2:
            sampling = sampling.with_guidance(1 + (sampling.guidance_scale - 1) * share)
        temperature, noise = sampling.temperature, published.noise if self.noise is None else self.noise
        plain = sampling.replaced(temperature=1 / self.sharpness, top_k=0, top_p=1.0, min_p=0.0)
        probabilities = plain = plain.probabilities(logits, places, state.invalid, ~sampled)
        if sampling.stacked or (temperature, sampling.top_k, sampling.top_p, sampling.min_p) != (1, 0, 1, 0):
            sampling = sampling.replaced(temperature=temperature / self.sharpness)
            probabilities = sampling.probabilities(logits, places)
        if published.gumbel or self.max_gumbel is not None:
            numbers = exponentials(state.seeds, places, steps, Purpose.SAMPLE, model.vocab_size)
            if self.max_gumbel is not None:
                numbers = numbers.clamp(min=math.exp(-self.max_gumbel))
            # The largest logarithm of a probability plus Gumbel noise.
            tokens = (probabilities / numbers).argmax(-1)
        else:
            tokens = sample_at(probabilities, state.seeds, places, steps, Purpose.SAMPLE)
        ratings = plain.gather(-1, tokens[..., None])[..., 0].clamp(min=1e-20).log()
        if noise:
            gumbel = -exponentials(state.seeds, places, steps, Purpose.GUMBEL, 1)[..., 0].log()
            if (self.noise_schedule or published.noise_schedule) == "linear":
                gumbel = gumbel * (1 - share[:, None])
            ratings = ratings + noise * by_lane(temperature) * gumbel
        return tokens, ratings


def _linspace(steps: int) -> np.ndarray:
    """`torch.linspace(0, 1, steps)`, whose numbers are rounded once each."""
    step, numbers = float(np.float32(1 / max(steps - 1, 1))), np.arange(steps)
    return np.where(numbers < steps // 2, step * numbers, 1 - step * (steps - 1 - numbers)).astype(np.float32)


def _counts(tokens: int, steps: int, schedule: str) -> list[int]:
    """The number of undecided tokens before each step and after the last one."""
    counts = [tokens]
    # In float32, as in the authors' code.
    if schedule == "maskgit":
        shares = np.cos(np.float32(np.pi / 2) * (np.arange(1, steps + 1, dtype=np.float32) / np.float32(steps)))
        left = np.floor(np.float32(tokens) * shares).astype(int).tolist()
    else:
        known = np.floor(np.float32(tokens) * _KNOWN[schedule](_linspace(steps))).astype(int).tolist()
        left = [tokens - max(step, count) for step, count in enumerate(known, 1)]
    for count in left[:-1]:
        if counts[-1] > 0:
            counts.append(min(max(count, 1), counts[-1] - 1) if schedule == "maskgit" else max(count, 0))
    return counts if counts[-1] == 0 else [*counts, 0]
