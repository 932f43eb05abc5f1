"""Masked decoding of continuous tokens: sets of tokens in a random order, each set in one forward pass."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .distribution import LatentSampling, Sampling
from .interface import MaskedLatentModel, needs_masked_latents
from .noise import Purpose, normals, random_orders
from .state import DecodingState


@dataclass
class MaskedState(DecodingState):
    """Adds to `DecodingState`: `order` [B, N], the positions of an image, of which the last are decided first; `known_buffer`
    bool [B, N + 1], which are decided; `masked` int64 [K + 1, B], how many are not before each step; `sizes`, per step the most
    visible and the most decided tokens of an image; `taken`, the number of steps taken. `tokens` are vectors, float32 [B, N, D],
    zeros where they are not decided."""

    # All images are at the same step.
    refillable = False

    model: MaskedLatentModel
    sampling: LatentSampling
    order: torch.LongTensor
    known_buffer: torch.BoolTensor
    masked: torch.LongTensor
    sizes: list[tuple[int, int]]
    taken: int = 0

    @property
    def decided(self) -> torch.BoolTensor:
        return self.known_buffer[:, : self.model.num_tokens]

    @property
    def max_steps(self) -> int:
        return len(self.sizes)

    @property
    def step_shape(self) -> None:
        return None


def masked_counts(tokens: int, steps: int) -> list[int]:
    """How many of so many tokens are not decided before each step and after the last: by a cosine, at least one token per step,
    and so no more steps than tokens."""
    counts, steps = [tokens], min(steps, tokens)
    for step in range(1, steps):
        cosine = math.floor(tokens * math.cos(math.pi / 2 * step / steps))
        counts.append(max(1, min(counts[-1] - 1, cosine)))
    return [*counts, 0]


@dataclass(frozen=True)
class MaskedDecoding:
    """Generate sets of continuous tokens in a random order, as MAR (https://arxiv.org/abs/2406.11838) does: a forward pass of the
    transformer per set, and then the denoising head for all tokens of the set at once.

    The sampling settings say in how many passes (`num_inference_steps`, sets that grow by a cosine) and in how many denoising
    steps. It is exact in the sense that it samples from what the model defines at these numbers of steps: the tokens of a set are
    sampled independently of each other, so other numbers are other distributions.
    """

    exact = True

    def supports(self, model: MaskedLatentModel) -> str | None:
        return needs_masked_latents(model)

    def start(self, model: MaskedLatentModel, sampling: Sampling, seeds: torch.LongTensor) -> MaskedState:
        """Decide the first set.

        Raises:
            ValueError: if there are more steps than tokens.
        """
        assert isinstance(sampling, LatentSampling)
        size, steps = model.num_tokens, sampling.num_inference_steps
        if steps > size:
            raise ValueError(f"num_inference_steps is {steps}: give at most {size}, as many as an image has tokens")
        order, unknown = random_orders(seeds, size), [size] * len(seeds)
        known = torch.zeros_like(order, dtype=torch.bool)
        tokens = torch.zeros(len(seeds), size + 1, model.dim, device=seeds.device)
        if sampling.forced is not None:
            known = ~sampling.forced.isnan().any(-1)
            tokens[:, :size] = torch.where(known[..., None], sampling.forced, 0)
            # What is known counts as decided first.
            order = order.gather(1, known.gather(1, order).to(torch.uint8).argsort(dim=1, stable=True))
            unknown = (~known).sum(1).tolist()
        rows = [masked_counts(count, steps) for count in unknown]
        length = max(2, *map(len, rows))
        rows = [row + [0] * (length - len(row)) for row in rows]
        state = MaskedState.open(
            model,
            sampling,
            seeds,
            None,
            order=order,
            known_buffer=F.pad(known, (0, 1)),
            masked=torch.tensor(rows, device=seeds.device).T.contiguous(),
            sizes=[
                (size - min(row[k] for row in rows), max(row[k] - row[k + 1] for row in rows))
                for k in range(length - 1)
            ],
        )
        state.token_buffer = tokens
        self.step(state)
        return state

    def step(self, state: MaskedState) -> None:
        model, size = state.model, state.model.num_tokens
        before, after = state.masked[state.taken], state.masked[state.taken + 1]
        visible, count = state.sizes[state.taken]
        padded = state.sampling.forced is not None
        conditions = model.forward(state.tokens, state.decided, visible, padded=padded)
        ranks = after[:, None] + torch.arange(count, device=model.device)
        live = ranks < before[:, None]
        positions = state.order.gather(1, ranks.clamp(max=size - 1))
        where = positions[..., None].expand(len(conditions), -1, -1, conditions.shape[-1])
        tokens = self.denoise(state, conditions.gather(2, where), positions, after)
        state.invalid |= (~tokens.isfinite().all(-1) & live).any(1)
        places = torch.where(live, positions, size)
        state.token_buffer.scatter_(1, places[..., None].expand(-1, -1, model.dim), tokens)
        state.known_buffer.scatter_(1, places, True)
        state.record(before - after)
        torch.eq(after, 0, out=state.finished)
        state.taken += 1

    def denoise(
        self, state: MaskedState, conditions: torch.Tensor, positions: torch.LongTensor, masked: torch.LongTensor
    ) -> torch.FloatTensor:
        """Sample the tokens [B, Q, D] at `positions` [B, Q] by their `conditions` [G, B, Q, C]; `masked` [B] tokens of each image
        are left to the steps after this one."""
        sampling, dim = state.sampling, state.model.dim
        guidance = sampling.guidance_at(1 - masked.clamp(min=1) / state.model.num_tokens)[:, None, None]
        steps, last = sampling.num_diffusion_steps, sampling.num_denoising_steps
        tokens = normals(state.seeds, positions, Purpose.DENOISE, torch.full_like(state.seeds, last), dim)
        for step in reversed(range(last)):
            tokens, std = state.model.denoise(step, tokens, conditions, guidance, steps)
            # The last step returns its mean.
            if step > 0:
                noise = normals(state.seeds, positions, Purpose.DENOISE, torch.full_like(state.seeds, step), dim)
                tokens = tokens + sampling.temperature * std * noise
        state.head_calls += last
        return tokens
