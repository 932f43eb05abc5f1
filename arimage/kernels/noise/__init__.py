"""Random numbers as a function of where they are used: Philox4x32-10 (Salmon et al. 2011) with a seed per image as its key."""

import torch

from .. import runs_triton
from . import reference


def _operations(seeds: torch.Tensor):
    if runs_triton(seeds):
        from . import triton

        return triton
    return reference


def uniforms(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor, purpose: int, count: int
) -> torch.FloatTensor:
    """Uniform numbers [B, Q, count] in [0, 1), float32, multiples of 2 ** -24.

    Args:
        seeds: int64 [B], the keys.
        positions: int64 [B, Q], in 0 .. 2 ** 32 - 1; with steps, purpose and the index of four numbers the counter.
        steps: int64 [B], in 0 .. 2 ** 32 - 1.
        purpose: in 0 .. 2 ** 32 - 1.
    """
    return _operations(seeds).uniforms(seeds, positions, steps, purpose, count)


def exponentials(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor, purpose: int, count: int
) -> torch.FloatTensor:
    """Exponential numbers [B, Q, count], float32, positive and finite; the arguments are those of `uniforms`.

    They resolve 2 ** -33, so that in a race of p / e tokens far rarer than float32's 2 ** -24 can win as well.
    """
    return _operations(seeds).exponentials(seeds, positions, steps, purpose, count)
