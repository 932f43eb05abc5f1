"""Sampling, and maximal coupling: a sample of one distribution becomes a sample of another, and changes as rarely as
possible."""

import torch

from .. import runs_triton
from . import reference


def _operations(probabilities: torch.Tensor):
    if runs_triton(probabilities):
        from . import triton

        return triton
    return reference


def sample(weights: torch.FloatTensor, uniform: torch.FloatTensor) -> torch.LongTensor:
    """Sample tokens [...] in proportion to `weights` [..., V] >= 0 (not all zero) by `uniform` [...] in [0, 1).

    A token of weight 0 is never sampled.
    """
    return _operations(weights).sample(weights, uniform)


def sample_at(
    weights: torch.FloatTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> torch.LongTensor:
    """`sample` by the first of the `noise.uniforms` of each place, in one launch: tokens [B, Q] from `weights`
    [B, Q, V], for `seeds` [B], `positions` [B, Q], `steps` [B] or None, and `purpose`."""
    return _operations(weights).sample_at(weights, seeds, positions, steps, purpose)


def race_at(
    weights: torch.FloatTensor,
    seeds: torch.LongTensor,
    positions: torch.LongTensor,
    steps: torch.LongTensor | None,
    purpose: int,
) -> torch.LongTensor:
    """Sample tokens as `sample_at` does, but by the `noise.exponentials` e of each place, as those of the largest
    `weights` / e: tokens that rarely change where the weights change little and the noise stays (the Gumbel trick)."""
    return _operations(weights).race_at(weights, seeds, positions, steps, purpose)


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
    return _operations(p).couple(p, q, x, noise)


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
    return _operations(p).couple_at(p, q, x, seeds, positions, steps, purpose)


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
    return _operations(p).couple_window(p, q, x, noise, live)
