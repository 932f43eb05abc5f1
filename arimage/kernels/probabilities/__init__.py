"""From a model's logits to the probabilities that its tokens are sampled from."""

import torch

from .. import runs_triton
from . import reference


def probabilities(
    logits: torch.Tensor,
    scale: float | torch.FloatTensor = 1.0,
    temperature: float | torch.FloatTensor = 1.0,
    top_k: int | torch.LongTensor = 0,
    top_p: float | torch.FloatTensor = 1.0,
    allowed: torch.BoolTensor | None = None,
) -> torch.FloatTensor:
    """Guidance, temperature, allowed tokens, top-k, top-p, softmax, in this order and in float32.

    Top-k keeps every token whose logit reaches the k-th largest. Top-p goes from the most to the least probable token, among
    equally probable ones from the lower id to the higher, and keeps a token as long as those before it sum to `top_p` at
    most; the first is always kept. Every setting is one number, or one per row [B]: float32, top_k int64. Not differentiable.

    Args:
        logits: [G, B, Q, V]: G = 1, or 2 for those with and those without the condition.
        scale: guidance u + scale (c - u) where G = 2; one per position [B, Q] is taken as well. 1 gives c exactly.
        temperature: > 0.
        top_k: 0 = all.
        top_p: in (0, 1]; 1 = all.
        allowed: bool [V], or [B, V] for each row, the tokens that may be sampled; None = all.

    Returns:
        Probabilities [B, Q, V], float32; NaN in the rows of logits that are NaN, +inf or all -inf.
    """
    if runs_triton(logits):
        from . import triton

        return triton.probabilities(logits, scale, temperature, top_k, top_p, allowed)
    return reference.probabilities(logits, scale, temperature, top_k, top_p, allowed)
