"""The sampling law: from a model's logits to the probabilities that a decoding must reproduce."""

from dataclasses import dataclass, field

import torch

from ..kernels import probabilities as kernel


@dataclass(frozen=True)
class Sampling:
    """How the next code is drawn: guidance, temperature, allowed codes, top-k, top-p, softmax, in this order.

    Attributes:
        guidance_scale: s in u + s (c - u); 1 = off. Used when the logits come with and without the condition.
        temperature: > 0.
        top_k: keep the codes whose logit reaches the k-th largest, ties included; 0 = all. 1 is greedy decoding.
        top_p: keep the most probable codes until their sum exceeds it, in (0, 1]; 1 = all.
        guided_tokens: guide the first n positions of an image only; None = all.
        allowed: bool [V], codes that may be drawn; None = all.
        forced: int64 [B, N], codes that stand already, whatever the model says of them; -1 = free. The other codes follow
            the model's law given all codes before them, forced ones included: what comes after a code has no say in it.

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
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}: give a number above 0, or top_k=1 for greedy decoding"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: give a number of codes, or 0 for all")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a probability above 0 and up to 1")

    def probabilities(self, logits: torch.Tensor, positions: torch.LongTensor) -> torch.FloatTensor:
        """Probabilities [B, Q, V] in float32 of the codes at `positions` [B, Q], from logits [G, B, Q, V], G = 1 or 2."""
        scale = self.guidance_scale
        if self.guided_tokens is not None:
            scale = torch.where(positions < self.guided_tokens, scale, 1.0)
        probabilities = kernel.probabilities(logits, scale, self.temperature, self.top_k, self.top_p, self.allowed)
        return self.force(probabilities, positions)

    def force(self, probabilities: torch.FloatTensor, positions: torch.LongTensor) -> torch.FloatTensor:
        """Laws [B, Q, V] of the codes at `positions` [B, Q] with those of forced codes one-hot."""
        if self.forced is None:
            return probabilities
        codes = self.forced.gather(1, positions)[..., None]
        one_hot = torch.arange(probabilities.shape[-1], device=codes.device) == codes
        return torch.where(codes < 0, probabilities, one_hot.to(probabilities.dtype))
