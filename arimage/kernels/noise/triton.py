"""The random numbers in Triton: each program computes up to 2 * `block` numbers for one position."""

from functools import partial

import torch
import triton
import triton.language as tl

from . import BLOCK, FIRST, POSITION, SECOND, SEED, STEP, key_of


_POSITION, _STEP, _SEED = (tl.constexpr(c) for c in (POSITION, STEP, SEED))
_BLOCK, _FIRST, _SECOND = (tl.constexpr(c) for c in (BLOCK, FIRST, SECOND))
NEXT = _BLOCK


@triton.jit
def _mix(words):
    """The finaliser of SplitMix64."""
    words = (words ^ (words >> 30)) * _FIRST
    words = (words ^ (words >> 27)) * _SECOND
    return words ^ (words >> 31)


@triton.jit
def _word(place, index):
    """Word `index` of 32 bits of a place, given the sum of its key, seed, position and step."""
    words = _mix(place + (index >> 1).to(tl.uint64) * _BLOCK)
    return (words >> ((index & 1) * 32).to(tl.uint64)).to(tl.uint32)


@triton.jit
def _uniform(words):
    return (words >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def place_of(seeds_ptr, steps_ptr, image, position, key):
    """The sum of seed, position, step and `key`, the key of the purpose."""
    sums = tl.load(seeds_ptr + image).to(tl.uint64) * _SEED + key.to(tl.uint64)
    sums += position.to(tl.uint64) * _POSITION
    if steps_ptr is not None:
        sums += tl.load(steps_ptr + image).to(tl.uint64) * _STEP
    return sums


@triton.jit
def uniform_of(place):
    """The first two uniform numbers of a place. Those of `place + NEXT` are the two after them."""
    words = _mix(place)
    return _uniform(words.to(tl.uint32)), _uniform((words >> 32).to(tl.uint32))


@triton.jit
def _exponential(words):
    uniform = ((words & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10
    uniform = tl.minimum(uniform, 1 - 5.9604644775390625e-08)
    # log1p(-u): the division corrects the rounding of 1 - u.
    rest = 1 - uniform
    exact = tl.where(rest == 1, 1.0, 1 - rest)
    return tl.where(rest == 1, uniform, -tl.log(rest) * tl.math.div_rn(uniform, exact))


@triton.jit
def exponentials_of(place, pair):
    """The two exponential numbers of each `pair` of a place."""
    words = _mix(place + pair.to(tl.uint64) * _BLOCK)
    return _exponential(words.to(tl.uint32)), _exponential((words >> 32).to(tl.uint32))


@triton.jit
def _cos_sin(words):
    """Cosine and sine of 2 pi `_uniform(words)`, by polynomials of Cephes for [-pi / 4, pi / 4]. Triton's own reduce
    angles of any size, for which they need a stack."""
    turn = (words >> 8).to(tl.int32)
    quarter = (turn + (1 << 21)) >> 22
    x = (turn - (quarter << 22)).to(tl.float32) * 3.7450702829239286e-07
    square = x * x
    sin = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4))
    cos = square * square * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    cos = 1 - 0.5 * square + cos
    odd = (quarter & 1) == 1
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((quarter + 1) & 2) == 2, -cos, cos), tl.where((quarter & 2) == 2, -sin, sin)


@triton.jit
def noise_kernel(
    seeds_ptr,
    positions_ptr,
    steps_ptr,
    out_ptr,
    queries,
    key,
    count,
    kind: tl.constexpr,
    block: tl.constexpr,
):
    """`key` is the key of the purpose. `kind`: "uniform", "exponential" or "normal" numbers."""
    place = tl.program_id(0).to(tl.int64)
    image = place // queries
    index = tl.program_id(1) * block + tl.arange(0, block)
    out_ptr += place * count
    sums = place_of(seeds_ptr, steps_ptr, image, tl.load(positions_ptr + place), key)
    if kind == "normal":
        pairs = (count + 1) // 2
        radius = tl.sqrt_rn(2 * _exponential(_word(sums, index)))
        cos, sin = _cos_sin(_word(sums, pairs + index))
        tl.store(out_ptr + index, radius * cos, mask=index < pairs)
        tl.store(out_ptr + pairs + index, radius * sin, mask=pairs + index < count)
    else:
        words = _mix(sums + index.to(tl.uint64) * _BLOCK)
        for half in tl.static_range(2):
            numbers = (words >> 32 * half).to(tl.uint32)
            numbers = _exponential(numbers) if kind == "exponential" else _uniform(numbers)
            tl.store(out_ptr + 2 * index + half, numbers, mask=2 * index + half < count)


def _numbers(kind, seeds, positions, steps, purpose, count):
    numbers = torch.empty(*positions.shape, count, dtype=torch.float32, device=seeds.device)
    yield numbers
    pairs = triton.cdiv(count, 2)
    block = min(512, triton.next_power_of_2(pairs))
    sizes = positions.shape[1], key_of(purpose), count
    grid = positions.numel(), triton.cdiv(pairs, block)
    noise_kernel[grid](seeds, positions, steps, numbers, *sizes, kind=kind, block=block)


uniforms, exponentials, normals = (partial(_numbers, kind) for kind in ("uniform", "exponential", "normal"))
