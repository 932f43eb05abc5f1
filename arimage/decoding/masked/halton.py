"""Halton decoding: masked tokens in an order that spreads them evenly, fixed before the first step."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from ...kernels.coupling import sample_at
from ..contract.distribution import Sampling
from ..contract.models import BoundModel, MaskedTokenModel
from ..contract.noise import Purpose, uniforms
from ..contract.settings import check_number, check_settings, check_several
from .sets import has_few_sizes, open_sets
from .tokens import Evaluate, MaskedTokenState, TokenSampler, given_tokens


def halton_order(rows: int, columns: int | None = None) -> torch.LongTensor:
    """The places [N] of a grid in the order of the Halton sequence of the bases 2 (rows) and 3 (columns), each when a
    point of the sequence first falls into it. `columns` are as many as `rows` by default."""
    return torch.from_numpy(_halton_places(rows, rows if columns is None else columns))


# Not of tensors, which may be fake.
@lru_cache(maxsize=8)
def _halton_places(rows: int, columns: int) -> np.ndarray:
    size, order, count = rows * columns, np.empty(0, np.int64), 0
    while len(order) < size:
        count = 2 * count or 4 * size
        points = np.arange(1, count + 1)
        places = _cells(points, 2, rows) * columns + _cells(points, 3, columns)
        order = places[np.sort(np.unique(places, return_index=True)[1])]
    return order


def _cells(points: np.ndarray, base: int, count: int) -> np.ndarray:
    """In which of `count` equal parts of [0, 1) the radical inverse of each of the points is, in whole numbers."""
    left, inverse, scale = points.copy(), np.zeros_like(points), 1
    while left.any():
        left, digits = np.divmod(left, base)
        inverse, scale = inverse * base + digits, scale * base
    return count * inverse // scale


@dataclass(frozen=True)
class HaltonDecoding(TokenSampler):
    """Generate sets of masked tokens in the order of a Halton sequence, as in Halton-MaskGIT
    (https://arxiv.org/abs/2503.17076): tokens of one set, which are sampled independently of each other, are far from
    each other. One forward pass per set; the sets grow by the arccos schedule.

    It is exact in the sense that it samples from the distribution that the model defines for this order and this
    number of steps, and these define another one than others do. The mask itself is never sampled, which the authors'
    code does not exclude.

    Attributes:
        steps: the number of forward passes, at most as many as an image has tokens. None takes 32, or as many as an
            image has tokens if these are fewer.
        randomize: whether the order of each image begins at a random place of the sequence.
        sharpness: factors on the logits in the first and in the last step, interpolated between them. Factors
            above 1 make tokens likelier that are likely.
        sharpness_power: the power that the interpolated factors are raised to.
        warmup_steps: so many first steps have half of their factor.
    """

    steps: int | None = None
    randomize: bool = True
    sharpness: tuple[float, float] = (1.0, 1.2)
    sharpness_power: float = 1.0
    warmup_steps: int = 0

    exact = True

    def __post_init__(self):
        check_settings(self, {"steps": 1, "warmup_steps": 0}, choices={"randomize": (False, True)})
        check_number(self, "sharpness_power", 0)
        sentence = "give two numbers above 0"
        check_several(
            self, "sharpness", float, lambda both: len(both) == 2 and all(0 < one <= 1e6 for one in both), sentence
        )

    def misfit(self, model: MaskedTokenModel) -> str | None:
        return too_many_steps(self.steps, model)

    def num_steps(self, model: MaskedTokenModel) -> int:
        return self.steps or min(32, model.num_tokens)

    def open(self, model: MaskedTokenModel, sampling: Sampling, seeds: torch.LongTensor, state_class: type) -> Any:
        order, size = halton_order(*model.layout.shape).to(seeds.device), model.num_tokens
        ranks = torch.arange(size, device=seeds.device).expand(len(seeds), -1)
        if self.randomize:
            share = uniforms(seeds, torch.zeros_like(seeds)[:, None], None, Purpose.ORDER, 1)[..., 0]
            ranks = (ranks - (size * share).long()) % size
        state = open_sets(
            model,
            sampling,
            seeds,
            state_class,
            order[ranks].flip(1),
            given_tokens(sampling),
            lambda count: _counts(count, self.num_steps(model)),
            few_sizes=has_few_sizes(seeds),
        )
        state.give(sampling)
        return state

    def decide(self, state: MaskedTokenState, evaluate: Evaluate, last: torch.LongTensor | None = None) -> None:
        places, live = state.next_set(*state.undecided)
        logits = evaluate(torch.where(live, places, state.model.num_tokens))
        sampling = state.sampling.replaced(temperature=state.sampling.temperature / self._factor(state))
        probabilities = sampling.probabilities(logits, places, state.invalid, ~live)
        state.decide(places, live, sample_at(probabilities, state.seeds, places, None, Purpose.SAMPLE))

    def _factor(self, state: MaskedTokenState) -> torch.FloatTensor:
        """The factors [B] on the logits of the next step."""
        first, last = self.sharpness
        share = state.steps.float() / max(self.num_steps(state.model) - 1, 1)
        factor = (first + (last - first) * share) ** self.sharpness_power
        return torch.where(state.steps < self.warmup_steps, factor / 2, factor)


def too_many_steps(steps: int | None, model: BoundModel) -> str | None:
    """Why so many steps do not fit the model, or None."""
    if steps is not None and steps > model.num_tokens:
        return f"steps is {steps}, and its images have {model.num_tokens} tokens"
    return None


def _counts(tokens: int, steps: int) -> list[int]:
    """The number of undecided tokens before each step and after the last one, by the arccos schedule."""
    # In float32, as in the authors' code.
    shares = 1 - np.arccos(np.arange(1, steps + 1, dtype=np.float32) / np.float32(steps)) / np.float32(np.pi / 2)
    decided = np.floor(np.float32(tokens) * shares).astype(int).tolist()
    counts = [tokens - min(max(step, count), tokens) for step, count in enumerate(decided, 1)]
    return [tokens, *counts[: counts.index(0) + 1]] if tokens else [0]
