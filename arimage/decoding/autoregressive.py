"""One token, or one block, per forward pass: the distribution that every exact decoding reproduces."""

from dataclasses import dataclass
from typing import Any, cast

import torch

from ..kernels.coupling import sample_at
from ..kernels.cursor import close_step, open_step
from .continuous.path_coupling import LatentSampling, PathState, start_paths, step_window
from .contract.distribution import Sampling
from .contract.models import CausalLatentModel, GroupModel, OrderedModel, TokenModel
from .contract.noise import Purpose
from .contract.state import CursorState, DecodingState
from .contract.supports import DecodingMethod


def prefill(
    model: TokenModel, sampling: Sampling, batch_size: int, scratch: int = 0, count: int = 1
) -> tuple[Any, torch.FloatTensor, torch.LongTensor]:
    """`model.prefill`, which also takes the given tokens at the first ranks of each image; returns their number [B]
    too. The logits are those of the rank after them; if there are none, and `count` is more than 1, those of a
    `GroupModel` for its first `count` ranks, [G, B, count, V]. The last token of an image is never prefilled. Reads
    the device if tokens are forced."""
    forced = sampling.forced
    num_given = torch.zeros(batch_size, dtype=torch.long, device=model.device)
    # In raster order given tokens are fed one after another, like all others.
    if forced is not None and model.layout.order is not None:
        num_given = (forced[:, :-1] >= 0).cumprod(1).sum(1)
        if most := int(num_given.max()):
            ranks = torch.arange(most, device=model.device)
            given = torch.where(ranks < num_given[:, None], forced[:, :most], -1)
            return *cast(OrderedModel, model).prefill(batch_size, scratch, given), num_given
    if count > 1:
        return *cast(GroupModel, model).prefill_group(batch_size, count, scratch), num_given
    return *model.prefill(batch_size, scratch), num_given


def decide_first(state: DecodingState, logits: torch.FloatTensor, num_given: torch.LongTensor | None = None) -> None:
    """Sample the first token or block from the logits of a prefill, [G, B, V] or [G, B, Q, V]: that of rank 0, or the
    one after the first `num_given` [B] tokens."""
    logits = logits if logits.ndim == 4 else logits[:, :, None]
    first = torch.zeros_like(state.seeds) if num_given is None else num_given
    if num_given is not None and state.sampling.forced is not None:
        ranks = torch.arange(state.model.num_tokens, device=num_given.device)
        state.write_tokens(ranks.expand(len(num_given), -1), ranks < num_given[:, None], state.sampling.forced)
    block = logits.shape[2]
    positions, end = first[:, None] + torch.arange(block, device=first.device), first + block
    probabilities = state.probabilities(logits, positions)
    state.token_buffer.scatter_(1, positions, sample_at(probabilities, state.seeds, positions, None, Purpose.SAMPLE))
    state.record(end)
    torch.eq(end, state.model.num_tokens, out=state.finished)


@dataclass
class AutoregressiveState(CursorState):
    """A `CursorState` whose steps decide one token, or one block."""

    model: TokenModel

    @property
    def newest(self) -> torch.BoolTensor:
        # Known tokens, which the prefill decides too, have already been fed.
        ranks, end = torch.arange(self.model.num_tokens, device=self.seeds.device), self.cursor[:, None]
        return (ranks >= end - self.model.block) & (ranks < end)

    @property
    def replaceable(self) -> bool:
        return True

    @property
    def reach(self) -> tuple[torch.LongTensor, int]:
        return self.furthest, self.model.block


def step_token(state: AutoregressiveState, **where: torch.Tensor) -> None:
    """Feed the newest token, or block, of every image and sample the next; `where` goes to the model."""
    model = state.model
    positions, previous, fed = open_step(state.cursor, state.finished, state.token_buffer, model.block)
    logits = model.forward(previous, fed, state.cache, **where)
    # The tokens of finished images are discarded.
    probabilities = state.probabilities(logits, positions, state.finished[:, None])
    tokens = sample_at(probabilities, state.seeds, positions, None, Purpose.SAMPLE)
    close_step(positions, tokens, state.token_buffer, *state.progress, model.num_tokens)


@dataclass(frozen=True)
class AutoregressiveDecoding(DecodingMethod):
    """Sample the tokens one after another: N forward passes per image. A model that predicts blocks of tokens takes
    one forward pass per block; the tokens of a block are independent of each other given the tokens before the block.
    With a `CausalLatentModel` the tokens are continuous, and every denoising step adds noise, including the last."""

    exact = True
    needs = {"tokens": (), "causal_latents": ()}

    def start(
        self, model: TokenModel | CausalLatentModel, sampling: Sampling, seeds: torch.LongTensor
    ) -> AutoregressiveState | PathState:
        if model.kind == "causal_latents":
            assert isinstance(sampling, LatentSampling)
            return start_paths(model, sampling, seeds, window=1)
        cache, logits, num_given = prefill(model, sampling, len(seeds))
        block = model.block
        state = AutoregressiveState.open(model, sampling, seeds, cache, spare=block, cursor=num_given + block)
        decide_first(state, logits, num_given)
        return state

    def step(self, state: AutoregressiveState | PathState) -> None:
        if isinstance(state, PathState):
            step_window(state, "none")
        else:
            step_token(state)
