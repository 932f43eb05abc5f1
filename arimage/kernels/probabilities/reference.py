"""The definition of the sampling distribution, in torch."""

import torch


def _by_row(setting):
    """A setting that broadcasts to [B, Q, V]: a number as it is, one number per row [B] as [B, 1, 1]."""
    return setting[:, None, None] if isinstance(setting, torch.Tensor) else setting


def probabilities(
    logits: torch.Tensor,
    scale: float | torch.FloatTensor,
    temperature: float | torch.FloatTensor,
    top_k: int | torch.LongTensor,
    top_p: float | torch.FloatTensor,
    allowed: torch.BoolTensor | None,
) -> torch.FloatTensor:
    logits, vocab_size = logits.float(), logits.shape[-1]
    if len(logits) == 2:
        conditional, unconditional = logits
        if isinstance(scale, torch.Tensor):
            scale = scale.reshape(logits.shape[1], -1, 1)  # pyright: ignore[reportAttributeAccessIssue] see `stubPath`
        logits = torch.lerp(unconditional, conditional, scale)
    else:
        logits = logits[0]
    logits = logits / _by_row(temperature)
    if allowed is not None:
        logits = logits.masked_fill(~(allowed if allowed.ndim == 1 else allowed[:, None]), -torch.inf)
    if isinstance(top_k, torch.Tensor):
        rank = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size) - 1
        ordered = logits.sort(dim=-1, descending=True).values
        smallest = ordered.gather(-1, _by_row(rank).expand(*logits.shape[:2], 1))
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    elif 0 < top_k < vocab_size:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if isinstance(top_p, torch.Tensor) or top_p < 1:
        if isinstance(top_p, torch.Tensor):
            top_p = torch.where(top_p < 1, top_p, torch.inf)
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.softmax(-1)
        before = ordered.cumsum(-1) - ordered
        cut = before > _by_row(top_p)
        logits = logits.masked_fill(cut.scatter(-1, order, cut), -torch.inf)
    return logits.softmax(-1)
