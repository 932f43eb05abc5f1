"""Group decoding: an any-order model generates its tokens in a few groups, one forward pass per group."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..kernels.coupling import sample_at
from .contract.distribution import Sampling, by_lane
from .contract.models import GroupModel
from .contract.noise import Purpose
from .contract.settings import LARGEST, check_settings
from .contract.state import LockstepState
from .contract.supports import DecodingMethod


Schedule = Literal["arccos", "cosine"]
GuidanceSchedule = Literal["linear", "constant"]
Attention = Literal["published", "causal"]


@dataclass
class GroupState(LockstepState):
    """Adds to `LockstepState`: `sizes`, the number of tokens of each group."""

    structure = frozenset({"sizes"})

    model: GroupModel
    sizes: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        return len(self.sizes)


def given_counts(model: GroupModel, sampling: Sampling) -> tuple[int, int]:
    """The smallest and the largest number of given tokens at the beginning of the images' orders. Reads the device if
    tokens are forced."""
    if sampling.forced is None or model.layout.order is None:
        return 0, 0
    num_given = (sampling.forced >= 0).cumprod(1).sum(1)
    return int(num_given.min()), int(num_given.max())


@dataclass(frozen=True)
class GroupDecoding(DecodingMethod):
    """The published parallel decoding of any-order models: ARPG (https://arxiv.org/abs/2503.10568), LPD
    (https://arxiv.org/abs/2507.01957) and RandAR (https://arxiv.org/abs/2412.01827).

    A forward pass predicts a whole group of tokens, each given all earlier groups, and samples them independently. The
    images follow the product of these distributions exactly. This is not the distribution of the model when it
    generates one token after another, where tokens of a group depend on each other. The difference has no bound and
    grows with the size of the groups. With groups of one token and constant guidance, the images are those of
    `AutoregressiveDecoding`.

    Attributes:
        groups: the number of groups, at most the number of tokens; the given tokens of an edited image are one more
            group. Or the size of each group: a tuple whose sum is the number of tokens, written "1+2+4+9" as text.
        schedule: how the sizes grow if they are not given: by the "arccos" or the "cosine" schedule of ARPG.
        guidance_schedule: with "linear", guidance grows along the image from a scale of 1 to `guidance_scale`, as in
            the code of the model's authors; with "constant", all tokens use `guidance_scale`.
        attention: which tokens of its own group a token attends to once the group is decided: as in the authors' code
            ("published"; for ARPG and LPD the whole group), or only earlier ones ("causal"; ARPG is trained this way).
    """

    groups: int | tuple[int, ...] = 32
    schedule: Schedule = "arccos"
    guidance_schedule: GuidanceSchedule = "linear"
    attention: Attention = "published"

    exact = False
    needs = {"tokens": ("single tokens", "groups")}

    def __post_init__(self):
        groups = self.groups
        if isinstance(groups, list | tuple):
            if not groups or not all(type(size) is int and 1 <= size <= LARGEST for size in groups):
                raise ValueError(
                    f"groups is {self.groups!r}: give how many there are, or the number of tokens of each"
                )
            object.__setattr__(self, "groups", tuple(groups))
        else:
            check_settings(self, {"groups": 1})
        check_settings(
            self,
            choices={
                "schedule": get_args(Schedule),
                "guidance_schedule": get_args(GuidanceSchedule),
                "attention": get_args(Attention),
            },
        )

    def sizes(self, num_tokens: int, num_given: int = 0) -> tuple[int, ...]:
        """The number of tokens of each group of an image of `num_tokens`. The first `num_given` tokens are one more
        group, unless the sizes are given."""
        if isinstance(self.groups, tuple):
            return self.groups
        assert isinstance(self.groups, int)
        first = [num_given] if num_given else []
        num_tokens -= num_given
        count, sizes = min(self.groups, num_tokens), []
        for group in range(1, count):
            share = (
                math.acos(group / count) / (math.pi / 2)
                if self.schedule == "arccos"
                else math.cos(math.pi / 2 * group / count)
            )
            left = num_tokens - sum(sizes)
            sizes.append(left - max(1, min(left - 1, int(num_tokens * share))))
        return (*first, *sizes, *([num_tokens - sum(sizes)] if num_tokens else []))

    def misfit(self, model: GroupModel) -> str | None:
        total = sum(self.sizes(model.num_tokens))
        return None if total == model.num_tokens else f"groups have {total} tokens, an image has {model.num_tokens}"

    def start(self, model: GroupModel, sampling: Sampling, seeds: torch.LongTensor) -> GroupState:
        """Decide the first group: the given tokens, if the images have any.

        Raises:
            ValueError: if the images have different numbers of given tokens.
        """
        # Given sizes do not depend on the given tokens.
        least, most = given_counts(model, sampling) if isinstance(self.groups, int) else (0, 0)
        if least < most:
            raise ValueError(
                f"the images keep {least} to {most} tokens, and their groups have one size: generate them one by one, "
                "or use another decoding"
            )
        sizes = self.sizes(model.num_tokens, most)
        cache, logits = model.prefill_group(len(seeds), sizes[0])
        state = GroupState.open(model, sampling, seeds, cache, sizes=sizes)
        self._decide(state, logits)
        return state

    def step(self, state: GroupState) -> None:
        if state.over:
            return
        last, count = sum(state.sizes[: state.taken - 1]), state.sizes[state.taken]
        tokens = state.tokens[:, last : last + state.sizes[state.taken - 1]]
        causal = self.attention == "causal"
        self._decide(state, state.model.forward_group(tokens, last, count, state.cache, causal=causal))

    def _decide(self, state: GroupState, logits: torch.FloatTensor) -> None:
        """Decide the next group, given its logits [G, B, count, V]."""
        batch, count = logits.shape[1:3]
        rank, sampling = sum(state.sizes[: state.taken]), state.sampling
        positions = (rank + torch.arange(count, device=logits.device)).expand(batch, -1)
        if self.guidance_schedule == "linear" and sampling.guided and len(logits) == 2:
            scale = 1 + (by_lane(sampling.guidance_scale) - 1) * state.model.guidance_progress(rank, count)
            sampling = sampling.with_guidance(scale.expand(batch, -1))
        probabilities = state.probabilities(logits, positions, sampling=sampling)
        tokens = sample_at(probabilities, state.seeds, positions, None, Purpose.SAMPLE)
        state.token_buffer.scatter_(1, positions, tokens)
        state.record(torch.full_like(state.seeds, count))
        state.taken += 1
        state.finished.fill_(state.over)
