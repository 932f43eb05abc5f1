"""The random numbers in Triton: a position and up to `block` numbers of it per program."""

import torch
import triton
import triton.language as tl


@triton.jit
def _store(out_ptr, words, index, count, exponential: tl.constexpr):
    if exponential:
        uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.9604644775390625e-08)
        # log1p(-u): what rounding takes from 1 - u is divided out again.
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
    purpose,
    count,
    exponential: tl.constexpr,
    block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    image = place // queries
    blocks = tl.program_id(1) * block + tl.arange(0, block)
    zero = tl.zeros([block], tl.uint32)
    position = zero + tl.load(positions_ptr + place).to(tl.uint32)
    step = zero + tl.load(steps_ptr + image).to(tl.uint32)
    word0, word1, word2, word3 = tl.philox(
        tl.load(seeds_ptr + image), position, step, zero + purpose.to(tl.uint32), blocks.to(tl.uint32)
    )
    out_ptr += place * count
    _store(out_ptr, word0, 4 * blocks, count, exponential)
    _store(out_ptr, word1, 4 * blocks + 1, count, exponential)
    _store(out_ptr, word2, 4 * blocks + 2, count, exponential)
    _store(out_ptr, word3, 4 * blocks + 3, count, exponential)


@torch.library.custom_op("arimage::noise", mutates_args=())
def _noise(
    seeds: torch.Tensor, positions: torch.Tensor, steps: torch.Tensor, purpose: int, count: int, exponential: bool
) -> torch.Tensor:
    numbers = torch.empty(*positions.shape, count, dtype=torch.float32, device=seeds.device)
    groups = triton.cdiv(count, 4)
    block = min(256, triton.next_power_of_2(groups))
    with torch.cuda.device_of(seeds):
        noise_kernel[(positions.numel(), triton.cdiv(groups, block))](
            seeds,
            positions,
            steps,
            numbers,
            positions.shape[1],
            purpose,
            count,
            exponential=exponential,
            block=block,
        )
    return numbers


@_noise.register_fake
def _(seeds, positions, steps, purpose, count, exponential):
    return torch.empty(*positions.shape, count, dtype=torch.float32, device=seeds.device)


def uniforms(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor, purpose: int, count: int
) -> torch.FloatTensor:
    return _noise(seeds.contiguous(), positions.contiguous(), steps.contiguous(), int(purpose), count, False)


def exponentials(
    seeds: torch.LongTensor, positions: torch.LongTensor, steps: torch.LongTensor, purpose: int, count: int
) -> torch.FloatTensor:
    return _noise(seeds.contiguous(), positions.contiguous(), steps.contiguous(), int(purpose), count, True)
