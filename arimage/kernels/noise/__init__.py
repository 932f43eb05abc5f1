"""Random numbers as a function of where they are used.

Seed, position, step, purpose and index are multiplied by odd constants and summed in 64 bits. The finaliser of
SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195) turns each sum into two words of 32
bits. It is a bijection, so different sums never give the same two words. The constants are powers of a multiplier with
a good spectral score (Steele and Vigna 2021, https://arxiv.org/abs/2001.05304): places of an image that lie less than
2 ** 16 apart have different sums.
"""

import math

import torch
from torch import library

from ..operation import operation


_MULTIPLIER = 0xD1342543DE82EF95
# Unsigned words of 64 bits.
POSITION, STEP, BLOCK, PURPOSE, SEED = (pow(_MULTIPLIER, power, 1 << 64) for power in range(1, 6))
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def signed(word: int) -> int:
    """The same 64 bits as an int64."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)


def key_of(purpose: int) -> int:
    """The key of a purpose, as an int64."""
    return signed((purpose + 1) * PURPOSE)


_POSITION, _STEP, _BLOCK, _SEED = map(signed, (POSITION, STEP, BLOCK, SEED))
_FIRST, _SECOND = signed(FIRST), signed(SECOND)


def splitmix(words: torch.LongTensor) -> torch.LongTensor:
    """The finaliser of SplitMix64, in place."""
    shifted = torch.empty_like(words)
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, None)):
        # The shift of an int64 repeats its sign.
        torch.bitwise_right_shift(words, shift, out=shifted).bitwise_and_((1 << 64 - shift) - 1)
        words ^= shifted
        if factor is not None:
            words *= factor
    return words


# One operator, because inductor multiplies constants without wrapping around.
@library.custom_op("arimage::words", mutates_args=())
def _words(
    seeds: torch.Tensor, positions: torch.Tensor, steps: torch.Tensor | None, purpose: int, count: int
) -> torch.Tensor:
    """Words of 32 bits [B, Q, count] as int32."""
    keys = seeds * _SEED + key_of(purpose)
    if steps is not None:
        keys = keys.add(steps, alpha=_STEP)
    places = keys[:, None].add(positions, alpha=_POSITION)[..., None]
    if count > 2:
        blocks = torch.arange((count + 1) // 2, device=places.device)
        places = places.add(blocks, alpha=_BLOCK)
    return splitmix(places).view(torch.int32)[..., :count].contiguous()


@_words.register_fake
def _(seeds, positions, steps, purpose, count):
    return positions.new_empty(*positions.shape, count, dtype=torch.int32)


def _uniform(words: torch.IntTensor) -> torch.FloatTensor:
    return words.bitwise_right_shift_(8).bitwise_and_((1 << 24) - 1).float().mul_(2.0**-24)


def _exponential(words: torch.IntTensor) -> torch.FloatTensor:
    # The last of the 2 ** 31 values would round to 1, where the logarithm is infinite.
    uniform = words.bitwise_and_((1 << 31) - 1).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


@operation(whole=("seeds", "positions", "steps"))
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
    return _uniform(_words(seeds, positions, steps, int(purpose), count))


@operation(whole=("seeds", "positions", "steps"))
def exponentials(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor | None, purpose: int, count: int
) -> torch.FloatTensor:
    """Exponential numbers [B, Q, count], float32, positive and finite. The arguments are those of `uniforms`.

    Their resolution is 2 ** -32, so that in a race of p / e tokens far rarer than float32's 2 ** -24 can also win.
    """
    return _exponential(_words(seeds, positions, steps, int(purpose), count))


@operation(whole=("seeds", "positions", "steps"))
def normals(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor | None, purpose: int, count: int
) -> torch.FloatTensor:
    """Standard normal numbers [B, Q, count], float32, by the method of Box and Muller. The arguments are those of
    `uniforms`. They depend on `count`."""
    pairs = (count + 1) // 2
    # Different words for radius and angle, so that they are independent.
    radii, angles = _words(seeds, positions, steps, int(purpose), 2 * pairs).split(pairs, dim=-1)
    radii, angles = (2 * _exponential(radii)).sqrt(), 2 * math.pi * _uniform(angles)
    return torch.cat([radii * angles.cos(), radii * angles.sin()], dim=-1)[..., :count]
