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
    min_p: float | torch.FloatTensor = 0.0,
    forced: torch.LongTensor | None = None,
    positions: torch.LongTensor | None = None,
    invalid: torch.BoolTensor | None = None,
    ended: torch.BoolTensor | None = None,
) -> torch.FloatTensor:
    """Guidance, temperature, allowed tokens, top-k, top-p, min-p, softmax, in this order and in float32.

    Top-k keeps every token whose logit is at least the k-th largest. Top-p goes from the most to the least probable
    token (equally probable ones by ascending id) and keeps a token while those before it sum to at most `top_p`; it
    always keeps the first. Min-p keeps every token whose logit is at least the largest one + log(`min_p`), that is,
    whose probability is at least `min_p` times the largest. Every setting is one number or one per row [B], float32,
    and int64 for `top_k`. Not differentiable.

    Args:
        logits: [G, B, Q, V], where G is 1, or 2 for logits with and without the condition.
        scale: of the guidance u + scale (c - u) if G is 2; may also be one per position [B, Q]. 1 gives c exactly.
        temperature: > 0.
        top_k: 0 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        allowed: bool [V], or [B, V] per row, the tokens that may be sampled; None allows all.
        min_p: in [0, 1]; 0 keeps all.
        forced: int64 [B, N], known tokens, -1 = not known. The probabilities of a known one are one-hot.
        positions: int64 [B, Q], with `forced`; one after the end counts as the last.
        invalid: bool [B], where True is written for a row with probabilities that are NaN.
        ended: bool [B, Q], the positions that do not count for `invalid`.

    Returns:
        Probabilities [B, Q, V], float32. Rows whose logits hold NaN or +inf, or are all -inf, are NaN.
    """
    settings = scale, temperature, top_k, top_p, allowed, min_p, forced, positions, invalid, ended
    if runs_triton(logits):
        from . import triton

        return triton.probabilities(logits, *settings)
    return reference.probabilities(logits, *settings)
