"""From a model's logits to the law that its codes are drawn from."""

import torch

from .. import runs_triton
from . import reference


def probabilities(
    logits: torch.Tensor,
    scale: float | torch.FloatTensor = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    allowed: torch.BoolTensor | None = None,
) -> torch.FloatTensor:
    """Guidance, temperature, allowed codes, top-k, top-p, softmax, in this order and in float32.

    Top-k keeps every code whose logit reaches the k-th largest. Top-p goes from the most to the least probable code, of
    equally probable ones from the lower id to the higher, and keeps a code as long as those before it sum to `top_p` at
    most; the first is always kept.

    Args:
        logits: [G, B, Q, V]: G = 1, or 2 for those with and those without the condition.
        scale: guidance u + scale (c - u) where G = 2, for all or for each place [B, Q].
        temperature: > 0.
        top_k: 0 = all.
        top_p: in (0, 1]; 1 = all.
        allowed: bool [V], the codes that may be drawn; None = all.

    Returns:
        Probabilities [B, Q, V], float32.
    """
    if runs_triton(logits):
        from . import triton

        return triton.probabilities(logits, scale, temperature, top_k, top_p, allowed)
    return reference.probabilities(logits, scale, temperature, top_k, top_p, allowed)
