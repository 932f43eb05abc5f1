"""Random numbers as a function of where they are used.

Seed, position, step, purpose and index are multiplied by odd constants and summed in 64 bits. The finaliser of
SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195) turns each sum into two words of 32
bits. It is a bijection, so different sums never give the same two words. The constants are powers of a multiplier with
a good spectral score (Steele and Vigna 2021, https://arxiv.org/abs/2001.05304): places of an image that lie less than
2 ** 16 apart have different sums.
"""

import torch

from .. import runs_triton
from . import reference


def _operations(seeds: torch.Tensor):
    if runs_triton(seeds):
        from . import triton

        return triton
    return reference


def uniforms(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor | None, purpose: int, count: int
) -> torch.FloatTensor:
    """Uniform numbers [B, Q, count] in [0, 1), float32, multiples of 2 ** -24. The first do not depend on `count`.

    Args:
        seeds: int64 [B].
        positions: int64 [B, Q].
        steps: int64 [B]; None counts as 0.
        purpose: >= 0.
    """
    return _operations(seeds).uniforms(seeds, positions, steps, purpose, count)


def exponentials(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor | None, purpose: int, count: int
) -> torch.FloatTensor:
    """Exponential numbers [B, Q, count], float32, positive and finite. The arguments are those of `uniforms`.

    Their resolution is 2 ** -32, so that in a race of p / e tokens far rarer than float32's 2 ** -24 can also win.
    """
    return _operations(seeds).exponentials(seeds, positions, steps, purpose, count)


def normals(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor | None, purpose: int, count: int
) -> torch.FloatTensor:
    """Standard normal numbers [B, Q, count], float32, by the method of Box and Muller. The arguments are those of
    `uniforms`. They depend on `count`."""
    return _operations(seeds).normals(seeds, positions, steps, purpose, count)
