"""The sampling distribution: from a model's logits to the probabilities that an exact decoding reproduces."""

import copy
import math
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Self

import torch

from ..kernels import probabilities as kernel


def _is_number(value, kind) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled: guidance, temperature, allowed tokens, top-k, top-p, softmax, in this order.

    Attributes:
        guidance_scale: s in u + s (c - u), with conditional logits c and unconditional logits u, >= 0; 0 to 1 disable it.
        temperature: >= 1e-6.
        top_k: keep the tokens whose logit reaches the k-th largest, ties included; 0 = all. 1 is greedy decoding.
        top_p: keep the most probable tokens until their sum exceeds it, in (0, 1]; 1 = all.
        guided_tokens: guide the first n tokens of an image only; None = all.
        allowed: bool [V], tokens that may be sampled; None = all.
        forced: int64 [B, N], known tokens by rank, -1 = to be sampled. A sampled token follows the model's distribution given
            all tokens before it, forced ones included; it does not depend on forced tokens after it.

    Raises:
        ValueError: if a number is out of its range.
    """

    guidance_scale: float = 1.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    guided_tokens: int | None = None
    allowed: torch.BoolTensor | None = field(default=None, compare=False)
    forced: torch.LongTensor | None = field(default=None, compare=False)

    def __post_init__(self):
        scale, temperature = self.guidance_scale, self.temperature
        if not (_is_number(scale, Real) and math.isfinite(scale) and scale >= 0):
            raise ValueError(f"guidance_scale is {scale!r}: give a finite number of at least 0; 1 disables guidance")
        if not (_is_number(temperature, Real) and math.isfinite(temperature) and temperature >= 1e-6):
            raise ValueError(
                f"temperature is {temperature!r}: give a finite number of at least 1e-6, or top_k=1 for greedy decoding"
            )
        if not (_is_number(self.top_k, Integral) and self.top_k >= 0):
            raise ValueError(f"top_k is {self.top_k!r}: give a number of tokens, or 0 for all")
        if not (_is_number(self.top_p, Real) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p is {self.top_p!r}: give a probability above 0 and up to 1")
        if self.guided_tokens is not None and not (
            _is_number(self.guided_tokens, Integral) and self.guided_tokens >= 0
        ):
            raise ValueError(f"guided_tokens is {self.guided_tokens!r}: give a number of tokens, or None for all")
        if self.allowed is not None and not (self.allowed.dtype == torch.bool and self.allowed.any()):
            raise ValueError("allowed must be a bool tensor [V] that allows at least one token")

    def with_guidance(self, scale: float) -> Self:
        """The same with another guidance scale. Nothing is checked again: a check of `allowed` waits for the device."""
        other = copy.copy(self)
        object.__setattr__(other, "guidance_scale", scale)
        return other

    def take(self, images: torch.LongTensor) -> Self:
        """That of the `images` [M]."""
        return self if self.forced is None else replace(self, forced=self.forced[images])

    def put(self, images: torch.LongTensor, other: Self, batch_size: int) -> Self:
        """That of `batch_size` images, of which `images` [M] are sampled as `other` says."""
        if self.forced is None and other.forced is None:
            return self
        mine, theirs = self.forced, other.forced
        if theirs is None:
            theirs = mine.new_full((len(images), mine.shape[1]), -1)
        if mine is None:
            mine = theirs.new_full((batch_size, theirs.shape[1]), -1)
        return replace(self, forced=mine.index_copy(0, images, theirs))

    def probabilities(self, logits: torch.Tensor, positions: torch.LongTensor) -> torch.FloatTensor:
        """Probabilities [B, Q, V] in float32 of the tokens at `positions` [B, Q], from logits [G, B, Q, V], G = 1 or 2."""
        scale = self.guidance_scale
        if self.guided_tokens is not None:
            scale = torch.where(positions < self.guided_tokens, scale, 1.0)
        probabilities = kernel.probabilities(logits, scale, self.temperature, self.top_k, self.top_p, self.allowed)
        return self.force(probabilities, positions)

    def force(self, probabilities: torch.FloatTensor, positions: torch.LongTensor) -> torch.FloatTensor:
        """Probabilities [B, Q, V] of the tokens at `positions` [B, Q], one-hot where a token is forced."""
        if self.forced is None:
            return probabilities
        tokens = self.forced.gather(1, positions)[..., None]
        one_hot = torch.arange(probabilities.shape[-1], device=tokens.device) == tokens
        return torch.where(tokens < 0, probabilities, one_hot.to(probabilities.dtype))

    def uniform(self, positions: torch.LongTensor, vocab_size: int) -> torch.FloatTensor:
        """Probabilities [B, Q, V] of the tokens at `positions` [B, Q] before the model was asked: uniform over the allowed
        tokens, one-hot where a token is forced."""
        if self.allowed is None:
            weights = torch.full((vocab_size,), 1 / vocab_size, device=positions.device)
        else:
            weights = self.allowed.float() / self.allowed.sum()
        return self.force(weights.expand(*positions.shape, -1), positions)
