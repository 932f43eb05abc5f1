"""The definition of the sampling distribution, in torch."""

import torch


def probabilities(
    logits: torch.Tensor,
    scale: float | torch.FloatTensor,
    temperature: float,
    top_k: int,
    top_p: float,
    allowed: torch.BoolTensor | None,
) -> torch.FloatTensor:
    logits = logits.float()
    if len(logits) == 2:
        conditional, unconditional = logits
        if isinstance(scale, torch.Tensor):
            scale = scale[..., None]  # pyright: ignore[reportIndexIssue] see `stubPath`
        logits = unconditional + (conditional - unconditional) * scale
    else:
        logits = logits[0]
    logits = logits / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        ordered = ordered.softmax(-1)
        before = ordered.cumsum(-1) - ordered
        cut = (before > top_p).scatter(-1, order, before > top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    return logits.softmax(-1)
