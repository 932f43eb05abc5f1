"""Drawing from a law, and turning a draw from one law into a draw from another while changing it as rarely as possible."""

import torch


def draw(weights: torch.FloatTensor, uniform: torch.FloatTensor) -> torch.LongTensor:
    """Codes [...] drawn in proportion to `weights` [..., V] >= 0 (not all zero) by `uniform` [...] in [0, 1).

    A code without weight is never drawn.
    """
    # Parallel sums need not be monotone: a code without weight gets an interval that nothing exceeds.
    cumulative = torch.where(weights > 0, weights.cumsum(-1), 0)
    total = cumulative.amax(-1)
    # u * total may round up to the total, which no code's interval contains.
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cumulative > target[..., None]).byte().argmax(-1)


def couple(
    p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, noise: torch.FloatTensor
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """Maximal coupling: if x ~ q, then y ~ p, and y = x as often as any coupling allows, 1 - TV(p, q).

    x is kept with probability min(1, p[x] / q[x]), else y is drawn from norm(max(p - q, 0)); where that is empty, from p.
    This is at once verification, residual sampling (speculative sampling, https://arxiv.org/abs/2302.01318) and the next
    draft of coupled speculative Jacobi decoding (https://arxiv.org/abs/2510.24211).

    Args:
        p, q: laws [..., V].
        x: codes [...].
        noise: uniforms [..., 2] in [0, 1): one to keep, one to draw.

    Returns:
        y [...] and whether x was kept [...] (bool).
    """
    p_x, q_x = (law.gather(-1, x[..., None]).squeeze(-1) for law in (p, q))
    kept = noise[..., 0] * q_x < p_x
    residual = (p - q).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p)
    return torch.where(kept, x, draw(residual, noise[..., 1])), kept
