"""The definition of sampling and coupling, in torch."""

import torch


def sample(weights: torch.FloatTensor, uniform: torch.FloatTensor) -> torch.LongTensor:
    # Parallel sums need not be monotone: a token without weight gets an interval that nothing exceeds.
    cumulative = torch.where(weights > 0, weights.cumsum(-1), 0)
    total = cumulative.amax(-1)
    # u * total may round up to the total, which no token's interval contains.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > target[..., None]).byte().argmax(-1)


def couple(
    p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, noise: torch.FloatTensor
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    p_x, q_x = (values.gather(-1, x[..., None]).squeeze(-1) for values in (p, q))
    kept = noise[..., 0] * q_x < p_x
    residual = (p - q).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return torch.where(kept, x, sample(residual, noise[..., 1])), kept


def couple_window(
    p: torch.FloatTensor,
    q: torch.FloatTensor,
    x: torch.LongTensor,
    noise: torch.FloatTensor,
    live: torch.BoolTensor,
) -> tuple[torch.LongTensor, torch.BoolTensor, torch.LongTensor]:
    y, kept = couple(p, q, x, noise)
    return y, kept, (kept & live).long().cumprod(-1).sum(-1)
