"""The reference of sampling and coupling in torch."""

import torch
import torch.nn.functional as F

from ..noise.reference import exponentials, uniforms


# The search runs over sums of this many weights first, then over the weights of one sum: a cumulative sum over all
# costs more.
_BLOCK = 128


def _search(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of the first of `weights` [..., N] at which their sum exceeds `target` [...], and the target minus the
    sum before it."""
    # Parallel sums need not be monotone: a weight of 0 gets an interval that contains no target.
    cumulative = torch.where(weights > 0, weights.cumsum(-1), 0)
    total = cumulative.amax(-1)
    # A target that is rounded up to the total would lie in no interval.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total))).clamp(min=0)[..., None]
    found = (cumulative > target).byte().argmax(-1, keepdim=True)
    before = cumulative.gather(-1, found) - weights.gather(-1, found)
    return found, (target - before).squeeze(-1)


def sample(weights: torch.FloatTensor, uniform: torch.FloatTensor) -> torch.LongTensor:
    size = weights.shape[-1]
    length = min(_BLOCK, size)
    if size % length:
        weights = F.pad(weights, (0, -size % length))
    blocks = weights.unflatten(-1, (-1, length))
    sums = blocks.sum(-1)
    block, target = _search(sums, uniform * sums.sum(-1))
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, length)).squeeze(-2)
    token, _ = _search(inside, target)
    return (block * length + token).squeeze(-1)


def sample_at(
    weights: torch.FloatTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> torch.LongTensor:
    return sample(weights, uniforms(seeds, positions, steps, purpose, 1)[..., 0])


def race_at(
    weights: torch.FloatTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> torch.LongTensor:
    # The argmax of p / e is the argmax of log p plus Gumbel noise.
    return (weights / exponentials(seeds, positions, steps, purpose, weights.shape[-1])).argmax(-1)


def couple(
    p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, noise: torch.FloatTensor
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    p_x, q_x = (values.gather(-1, x[..., None]).squeeze(-1) for values in (p, q))
    kept = noise[..., 0] * q_x < p_x
    residual = (p - q).clamp_(min=0)
    nothing = residual.sum(-1, keepdim=True) == 0
    # p itself where the residual is empty. This is faster than `torch.where`.
    residual = residual.addcmul_(p, nothing.to(p.dtype))
    return torch.where(kept, x, sample(residual, noise[..., 1])), kept


def couple_at(
    p: torch.FloatTensor,
    q: torch.FloatTensor,
    x: torch.LongTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> tuple[torch.LongTensor, torch.BoolTensor, torch.FloatTensor]:
    noise = uniforms(seeds, positions.flatten(1), steps, purpose, 3).view(*x.shape, 3)
    return *couple(p, q, x, noise[..., :2]), noise


def couple_window(
    p: torch.FloatTensor,
    q: torch.FloatTensor,
    x: torch.LongTensor,
    noise: torch.FloatTensor,
    live: torch.BoolTensor,
) -> tuple[torch.LongTensor, torch.LongTensor]:
    y, kept = couple(p, q, x, noise)
    return y, (kept & live).long().cumprod(-1).sum(-1)
