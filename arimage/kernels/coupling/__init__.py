"""Sampling, and maximal coupling: a sample of one distribution becomes a sample of another, and changes as rarely as
possible."""

import torch
import torch.nn.functional as F

from ..noise import exponentials, uniforms
from ..operation import operation


# The search runs over sums of this many weights first, then over the weights of one sum: a cumulative sum over all
# costs more.
_BLOCK = 128


def _search(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of the first of `weights` [..., N] at which their sum exceeds `target` [...], and the target minus the
    sum before it."""
    # Parallel sums need not be monotone: a weight of 0 gets an interval that contains no target.
    cumulative = torch.where(weights > 0, weights.cumsum(-1), 0)
    total = cumulative.amax(-1)
    target = _below(target, total)[..., None]
    found = (cumulative > target).byte().argmax(-1, keepdim=True)
    before = cumulative.gather(-1, found) - weights.gather(-1, found)
    return found, (target - before).squeeze(-1)


def _below(target: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    # A target that is rounded up to the total would lie in no interval.
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total))).clamp_(min=0)


@operation(whole=("weights",))
def sample(weights: torch.FloatTensor, uniform: torch.FloatTensor) -> torch.LongTensor:
    """Sample tokens [...] in proportion to `weights` [..., V] >= 0 (not all zero) by `uniform` [...] in [0, 1).

    A token of weight 0 is never sampled.
    """
    size = weights.shape[-1]
    if size == 2:
        # A bit: the second where the target is not before the end of the first.
        first, total = weights[..., 0], weights[..., 0] + weights[..., 1]
        return (_below(uniform * total, total) >= first).long()
    if size <= _BLOCK:
        total = weights.sum(-1)
        token, _ = _search(weights, _below(uniform * total, total))
        return token.squeeze(-1)
    if size % _BLOCK:
        weights = F.pad(weights, (0, -size % _BLOCK))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(-1)
    block, target = _search(sums, uniform * sums.sum(-1))
    inside = blocks.gather(-2, block[..., None].expand(*block.shape, _BLOCK)).squeeze(-2)
    token, _ = _search(inside, target)
    return (block * _BLOCK + token).squeeze(-1)


@operation(whole=("weights", "positions"))
def sample_at(
    weights: torch.FloatTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> torch.LongTensor:
    """`sample` by the first of the `noise.uniforms` of each place, in one launch: tokens [B, Q] from `weights`
    [B, Q, V], for `seeds` [B], `positions` [B, Q], `steps` [B] or None, and `purpose`."""
    return sample(weights, uniforms(seeds, positions, steps, purpose, 1)[..., 0])


@operation(whole=("weights", "positions"))
def race_at(
    weights: torch.FloatTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> torch.LongTensor:
    """Sample tokens as `sample_at` does, but by the `noise.exponentials` e of each place, as those of the largest
    `weights` / e: tokens that rarely change where the weights change little and the noise stays (the Gumbel trick)."""
    # The argmax of p / e is the argmax of log p plus Gumbel noise.
    return (weights / exponentials(seeds, positions, steps, purpose, weights.shape[-1])).argmax(-1)


@operation(whole=("p", "q", "x"))
def couple(
    p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, noise: torch.FloatTensor
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """Maximal coupling: if x ~ q, then y ~ p, and y = x as often as any coupling allows, 1 - TV(p, q).

    x is kept with probability min(1, p[x] / q[x]). Otherwise y is sampled from norm(max(p - q, 0)), or from p if that
    is empty. This is the verification and residual sampling of speculative sampling
    (https://arxiv.org/abs/2302.01318), and also the next draft of coupled speculative Jacobi decoding
    (https://arxiv.org/abs/2510.24211).

    Args:
        p, q: probabilities [..., V].
        x: tokens [...].
        noise: uniforms [..., 2] in [0, 1): one to keep x, one to sample y.

    Returns:
        y [...], and bool [...]: whether x was kept.
    """
    p_x, q_x = (values.gather(-1, x[..., None]).squeeze(-1) for values in (p, q))
    kept = noise[..., 0] * q_x < p_x
    residual = (p - q).clamp_(min=0)
    nothing = residual.sum(-1, keepdim=True) == 0
    # p itself where the residual is empty. This is faster than `torch.where`.
    residual = residual.addcmul_(p, nothing.to(p.dtype))
    return torch.where(kept, x, sample(residual, noise[..., 1])), kept


@operation(whole=("p", "q", "x", "positions"))
def couple_at(
    p: torch.FloatTensor,
    q: torch.FloatTensor,
    x: torch.LongTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> tuple[torch.LongTensor, torch.BoolTensor, torch.FloatTensor]:
    """`couple` by the first two of the `noise.uniforms` of each place, in one launch.

    Args:
        p, q: probabilities [B, ..., V].
        x: tokens [B, ...].
        seeds: int64 [B].
        positions: int64 [B, ...].
        steps: int64 [B] or None.

    Returns:
        y [B, ...], bool [B, ...], and three numbers of each place, [B, ..., 3]: the two and one that is unused.
    """
    noise = uniforms(seeds, positions.flatten(1), steps, purpose, 3).view(*x.shape, 3)
    return *couple(p, q, x, noise[..., :2]), noise


def couple_window(
    p: torch.FloatTensor,
    q: torch.FloatTensor,
    x: torch.LongTensor,
    noise: torch.FloatTensor,
    live: torch.BoolTensor,
) -> tuple[torch.LongTensor, torch.LongTensor]:
    """`couple` for windows [B, W], and how many leading drafts of each window are live and kept.

    Args:
        p, q: probabilities [B, W, V].
        x: tokens [B, W].
        noise: uniforms [B, W, 2] in [0, 1).
        live: bool [B, W], the positions that count.

    Returns:
        y [B, W], and the numbers of drafts [B], 0 .. W.
    """
    leading = torch.full_like(x[:, 0], x.shape[1])
    y, _ = _couple_window(p, q, x, noise, live, leading)
    return y, leading


@operation(writes=("leading",), whole=("p", "q", "x", "live"))
def _couple_window(
    p: torch.FloatTensor,
    q: torch.FloatTensor,
    x: torch.LongTensor,
    noise: torch.FloatTensor,
    live: torch.BoolTensor,
    leading: torch.LongTensor,
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    y, kept = couple(p, q, x, noise)
    leading.copy_((kept & live).long().cumprod(-1).sum(-1))
    return y, kept
