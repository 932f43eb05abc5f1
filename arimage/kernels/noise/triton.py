"""The random numbers in Triton: each program computes up to 2 * `block` numbers of one position."""

import torch
import triton
import triton.language as tl
from torch import library

from . import constants


_POSITION, _STEP, _SEED = (tl.constexpr(c) for c in (constants.POSITION, constants.STEP, constants.SEED))
_BLOCK, _FIRST, _SECOND = (tl.constexpr(c) for c in (constants.BLOCK, constants.FIRST, constants.SECOND))


@triton.jit
def _store(out_ptr, words, index, count, exponential: tl.constexpr):
    words = words.to(tl.uint32)
    if exponential:
        uniform = ((words & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
        uniform = tl.minimum(uniform, 1 - 5.9604644775390625e-08)
        # log1p(-u): the division corrects the rounding of 1 - u.
        rest = 1 - uniform
        exact = tl.where(rest == 1, 1.0, 1 - rest)
        values = tl.where(rest == 1, uniform, -tl.log(rest) * tl.math.div_rn(uniform, exact))
    else:
        values = (words >> 8).to(tl.float32) * 5.9604644775390625e-08
    tl.store(out_ptr + index, values, mask=index < count)


@triton.jit
def noise_kernel(
    seeds_ptr,
    positions_ptr,
    steps_ptr,
    out_ptr,
    queries,
    key,
    count,
    exponential: tl.constexpr,
    block: tl.constexpr,
):
    """`key` is the key of the purpose."""
    place = tl.program_id(0).to(tl.int64)
    image = place // queries
    blocks = tl.program_id(1) * block + tl.arange(0, block)
    words = blocks.to(tl.uint64) * _BLOCK + key.to(tl.uint64)
    words += tl.load(seeds_ptr + image).to(tl.uint64) * _SEED
    words += tl.load(positions_ptr + place).to(tl.uint64) * _POSITION
    if steps_ptr is not None:
        words += tl.load(steps_ptr + image).to(tl.uint64) * _STEP
    words = (words ^ (words >> 30)) * _FIRST
    words = (words ^ (words >> 27)) * _SECOND
    words ^= words >> 31
    out_ptr += place * count
    _store(out_ptr, words, 2 * blocks, count, exponential)
    _store(out_ptr, words >> 32, 2 * blocks + 1, count, exponential)


@library.custom_op("arimage::noise", mutates_args=())
def _noise(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    steps: torch.Tensor | None,
    purpose: int,
    count: int,
    exponential: bool,
) -> torch.Tensor:
    numbers = torch.empty(*positions.shape, count, dtype=torch.float32, device=seeds.device)
    pairs = triton.cdiv(count, 2)
    block = min(512, triton.next_power_of_2(pairs))
    with torch.cuda.device_of(seeds):
        noise_kernel[(positions.numel(), triton.cdiv(pairs, block))](
            seeds,
            positions,
            steps,
            numbers,
            positions.shape[1],
            constants.signed((purpose + 1) * constants.PURPOSE),
            count,
            exponential=exponential,
            block=block,
        )
    return numbers


@_noise.register_fake
def _(seeds, positions, steps, purpose, count, exponential):
    return torch.empty(*positions.shape, count, dtype=torch.float32, device=seeds.device)


def _numbers(seeds, positions, steps, purpose, count, exponential) -> torch.FloatTensor:
    steps = None if steps is None else steps.contiguous()
    return _noise(seeds.contiguous(), positions.contiguous(), steps, int(purpose), count, exponential)


def uniforms(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor | None, purpose: int, count: int
) -> torch.FloatTensor:
    return _numbers(seeds, positions, steps, purpose, count, False)


def exponentials(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor | None, purpose: int, count: int
) -> torch.FloatTensor:
    return _numbers(seeds, positions, steps, purpose, count, True)
