"""From a model's logits to the probabilities that its tokens are sampled from."""

import torch

from ..operation import DEVICES, operation
from .reference import cut, force, keep_largest


def _by_row(setting):
    """A setting that broadcasts to [B, Q, V]: a number stays, one number per row [B] becomes [B, 1, 1]."""
    return setting[:, None, None] if isinstance(setting, torch.Tensor) else setting


def guide(values: torch.Tensor, scale: float | torch.FloatTensor = 1.0) -> torch.FloatTensor:
    """u + scale (c - u) in float32 of `values` [2, B, Q, D], c and u, or the only ones of [1, B, Q, D]. `scale` is a
    number, one per row [B], or one per position [B, Q]; 1 gives c exactly."""
    if len(values) == 1:
        return values[0].float()
    conditional, unconditional = values.float()
    if isinstance(scale, torch.Tensor):
        scale = scale.reshape(values.shape[1], -1, 1)  # pyright: ignore[reportAttributeAccessIssue] see `stubPath`
    return torch.lerp(unconditional, conditional, scale)


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
    if logits.device.type in DEVICES:
        settings = _settings(logits, scale, temperature, top_k, top_p, min_p)
        positions = None if forced is None or positions is None else positions.expand(logits.shape[1:3])
        return _probabilities(logits, *settings, allowed, forced, positions, invalid, ended)
    vocab_size, device = logits.shape[-1], logits.device
    logits = guide(logits, scale)
    if isinstance(temperature, torch.Tensor) or temperature != 1:
        logits = logits / _by_row(temperature)
    if allowed is not None:
        logits = logits.masked_fill(~(allowed if allowed.ndim == 1 else allowed[:, None]), -torch.inf)
    if isinstance(top_k, torch.Tensor) or 0 < top_k < vocab_size:
        # Before the softmax, where the weights of unlikely tokens would be subnormal numbers, which are slow.
        logits = keep_largest(logits, torch.as_tensor(_by_row(top_k), device=device))
    probabilities = logits.softmax(-1)
    cuts_p = isinstance(top_p, torch.Tensor) or top_p < 1
    cuts_min = isinstance(min_p, torch.Tensor) or min_p > 0
    if cuts_p or cuts_min:
        top_p = torch.as_tensor(_by_row(top_p), device=device, dtype=torch.float32) if cuts_p else None
        min_p = torch.as_tensor(_by_row(min_p), device=device, dtype=torch.float32) if cuts_min else None
        cut(logits, probabilities, top_p, min_p)
    if forced is not None:
        assert positions is not None
        probabilities = force(probabilities, forced, positions)
    if invalid is not None:
        # Logits that are not finite make the whole row NaN.
        broken = probabilities[..., 0].isnan()
        invalid |= (broken if ended is None else broken > ended).any(1)
    return probabilities


def _settings(
    logits: torch.Tensor, scale, temperature, top_k, top_p, min_p
) -> tuple[float, float, int, float, float, torch.FloatTensor | None, list[torch.Tensor]]:
    """The settings that `_probabilities` takes: its tensors are of all rows."""
    batch, queries = logits.shape[1:3]
    scales, rows = None, []
    if isinstance(scale, torch.Tensor):
        scales, scale = scale.reshape(batch, -1).expand(batch, queries), 1.0
    settings = [(temperature, torch.float32), (top_k, torch.int64), (top_p, torch.float32)]
    if isinstance(min_p, torch.Tensor) or min_p > 0:
        settings.append((min_p, torch.float32))
    if any(isinstance(setting, torch.Tensor) for setting, _ in settings):
        rows = [
            setting
            if isinstance(setting, torch.Tensor)
            else torch.full((batch,), setting, dtype=dtype, device=logits.device)
            for setting, dtype in settings
        ]
        temperature, top_k, top_p, min_p = 1.0, 0, 1.0, 0.0
    return float(scale), float(temperature), int(top_k), float(top_p), float(min_p), scales, rows


@operation(writes=("invalid",), whole=("logits", "allowed", "forced", "positions"))
def _probabilities(
    logits: torch.Tensor,
    scale: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    scales: torch.FloatTensor | None,
    rows: list[torch.Tensor],
    allowed: torch.BoolTensor | None,
    forced: torch.LongTensor | None,
    positions: torch.LongTensor | None,
    invalid: torch.BoolTensor | None,
    ended: torch.BoolTensor | None,
) -> torch.FloatTensor:
    """`scales` [B, Q] replaces `scale`. `rows`, if not empty, replaces temperature, top_k, top_p and, if there are
    four, min_p, [B] each."""
    temperature, top_k, top_p, min_p = [*(rows or (temperature, top_k, top_p)), min_p][:4]
    marks = forced, positions, invalid, ended
    return probabilities(
        logits, scale if scales is None else scales, temperature, top_k, top_p, allowed, min_p, *marks
    )
