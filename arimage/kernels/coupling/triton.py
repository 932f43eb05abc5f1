"""Sampling and coupling in Triton: one program per draft, which reads all its probabilities only if the draft is
rejected."""

import torch
import triton
import triton.language as tl

from ..noise import key_of
from ..noise.triton import NEXT, exponentials_of, place_of, uniform_of


@triton.jit
def _weights(p_ptr, q_ptr, q_size, tokens, vocab_size):
    """max(p - q, 0). `q_size` is the vocabulary size, or 0 for p itself."""
    p = tl.load(p_ptr + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
    q = tl.load(q_ptr + tokens, mask=tokens < q_size, other=0.0).to(tl.float32)
    return tl.maximum(p - q, 0.0)


@triton.jit
def _block_sums(p_ptr, q_ptr, q_size, vocab_size, block: tl.constexpr, blocks: tl.constexpr):
    index = tl.arange(0, blocks)
    sums = tl.full([blocks], 0.0, tl.float32)
    for start in range(0, vocab_size, block):
        weights = _weights(p_ptr, q_ptr, q_size, start + tl.arange(0, block), vocab_size)
        sums = tl.where(index * block == start, tl.sum(weights), sums)
    return sums


@triton.jit
def _first(where, otherwise, size: tl.constexpr):
    """The first index of [size] where `where` is True, else the last where `otherwise` is, else 0."""
    index = tl.arange(0, size)
    first = tl.min(tl.where(where, index, size))
    return tl.where(first < size, first, tl.maximum(tl.max(tl.where(otherwise, index, -1)), 0))


@triton.jit
def _sample(p_ptr, q_ptr, q_size, uniform, vocab_size, block: tl.constexpr, blocks: tl.constexpr):
    """Find the block where the sum of weights exceeds the target share of the total, then the token in the block."""
    sums = _block_sums(p_ptr, q_ptr, q_size, vocab_size, block, blocks)
    remains = tl.max(sums) > 0
    if not remains:
        sums = _block_sums(p_ptr, q_ptr, 0, vocab_size, block, blocks)
    ends = tl.cumsum(sums)
    target = uniform * tl.max(ends)
    # If, by rounding, no sum exceeds the target, take the last token with weight.
    chosen = _first((ends > target) & (sums > 0), sums > 0, blocks)
    target -= tl.sum(tl.where(tl.arange(0, blocks) == chosen - 1, ends, 0.0))
    weights = _weights(p_ptr, q_ptr, tl.where(remains, q_size, 0), chosen * block + tl.arange(0, block), vocab_size)
    return chosen * block + _first((tl.cumsum(weights) > target) & (weights > 0), weights > 0, block)


@triton.jit
def sample_kernel(
    weights_ptr, uniform_ptr, out_ptr, uniform_stride, vocab_size, block: tl.constexpr, blocks: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64)
    weights_ptr += place * vocab_size
    uniform = tl.load(uniform_ptr + place * uniform_stride)
    token = _sample(weights_ptr, weights_ptr, 0, uniform, vocab_size, block, blocks)
    tl.store(out_ptr + place, token.to(tl.int64))


@triton.jit
def sample_at_kernel(
    weights_ptr,
    seeds_ptr,
    positions_ptr,
    steps_ptr,
    out_ptr,
    key,
    queries,
    vocab_size,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """`key` is the key of the purpose."""
    place = tl.program_id(0).to(tl.int64)
    weights_ptr += place * vocab_size
    uniform, _ = uniform_of(place_of(seeds_ptr, steps_ptr, place // queries, tl.load(positions_ptr + place), key))
    token = _sample(weights_ptr, weights_ptr, 0, uniform, vocab_size, block, blocks)
    tl.store(out_ptr + place, token.to(tl.int64))


@triton.jit
def race_at_kernel(
    weights_ptr, seeds_ptr, positions_ptr, steps_ptr, out_ptr, key, queries, vocab_size, block: tl.constexpr
):
    """`key` is the key of the purpose. Numbers come in pairs, `block` of which are in flight."""
    place = tl.program_id(0).to(tl.int64)
    weights_ptr += place * vocab_size
    sums = place_of(seeds_ptr, steps_ptr, place // queries, tl.load(positions_ptr + place), key)
    best = tl.full([block], -1.0, tl.float32)
    token = tl.full([block], 0, tl.int32)
    for start in range(0, (vocab_size + 1) // 2, block):
        pair = start + tl.arange(0, block)
        first, second = exponentials_of(sums, pair)
        for half in tl.static_range(2):
            index = 2 * pair + half
            weights = tl.load(weights_ptr + index, mask=index < vocab_size, other=-1.0)
            weights = tl.math.div_rn(weights, second if half else first)
            token = tl.where(weights > best, index, token)
            best = tl.maximum(best, weights)
    # Of equal ones the first.
    found = tl.min(tl.where(best == tl.max(best), token, vocab_size))
    tl.store(out_ptr + place, tl.minimum(found, vocab_size - 1).to(tl.int64))


@triton.jit
def _couple(
    p_ptr, q_ptr, token, y_ptr, kept_ptr, test, uniform, vocab_size, block: tl.constexpr, blocks: tl.constexpr
):
    """Store the token and whether it was kept, given the number to `test` it by and the one to sample another by."""
    p_x = tl.load(p_ptr + token).to(tl.float32)
    q_x = tl.load(q_ptr + token).to(tl.float32)
    kept = test * q_x < p_x
    # Stored before the sampling, they need no registers during it.
    tl.store(kept_ptr, kept.to(tl.uint8))
    tl.store(y_ptr, token)
    if not kept:
        other = _sample(p_ptr, q_ptr, vocab_size, uniform, vocab_size, block, blocks)
        tl.store(y_ptr, other.to(tl.int64))
    return kept


@triton.jit
def couple_at_kernel(
    p_ptr,
    q_ptr,
    x_ptr,
    seeds_ptr,
    positions_ptr,
    steps_ptr,
    y_ptr,
    kept_ptr,
    noise_ptr,
    key,
    queries,
    vocab_size,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """`key` is the key of the purpose."""
    place = tl.program_id(0).to(tl.int64)
    noise_ptr += 3 * place
    sums = place_of(seeds_ptr, steps_ptr, place // queries, tl.load(positions_ptr + place), key)
    test, uniform = uniform_of(sums)
    unused, _ = uniform_of(sums + NEXT)
    tl.store(noise_ptr, test)
    tl.store(noise_ptr + 1, uniform)
    tl.store(noise_ptr + 2, unused)
    token = tl.load(x_ptr + place)
    begin = place * vocab_size
    y_ptr, kept_ptr = y_ptr + place, kept_ptr + place
    _couple(p_ptr + begin, q_ptr + begin, token, y_ptr, kept_ptr, test, uniform, vocab_size, block, blocks)


@triton.jit
def couple_kernel(
    p_ptr,
    q_ptr,
    x_ptr,
    noise_ptr,
    live_ptr,
    y_ptr,
    kept_ptr,
    leading_ptr,
    window,
    vocab_size,
    noise_stride,
    counts: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """`counts`: whether there are `live_ptr` and `leading_ptr`. `leading_ptr` starts with the window's length."""
    place = tl.program_id(0).to(tl.int64)
    noise_ptr += place * noise_stride
    token, begin = tl.load(x_ptr + place), place * vocab_size
    test, uniform = tl.load(noise_ptr), tl.load(noise_ptr + 1)
    y_ptr, kept_ptr = y_ptr + place, kept_ptr + place
    kept = _couple(p_ptr + begin, q_ptr + begin, token, y_ptr, kept_ptr, test, uniform, vocab_size, block, blocks)
    if counts:
        if (not kept) | (tl.load(live_ptr + place) == 0):
            tl.atomic_min(leading_ptr + place // window, place % window)


def noise_rows(noise: torch.Tensor) -> torch.Tensor:
    """Numbers [..., K] as rows [M, K] that are contiguous along K. Rows that already are, are not copied."""
    noise = noise.flatten(0, -2) if noise.ndim > 1 else noise[None]
    return noise if noise.stride(1) == 1 else noise.contiguous()


def _blocks(vocab_size: int) -> dict[str, int]:
    block = min(4096, triton.next_power_of_2(vocab_size))
    return {"block": block, "blocks": triton.next_power_of_2(triton.cdiv(vocab_size, block))}


def sample(weights, uniform):
    size = weights.shape[-1]
    tokens = torch.empty(uniform.shape, dtype=torch.long, device=uniform.device)
    yield tokens
    # Flattening `noise[..., k]`, one number per position, does not copy it.
    uniform = uniform.flatten()
    sample_kernel[(len(uniform),)](weights, uniform, tokens, uniform.stride(0), size, **_blocks(size), num_warps=8)


def sample_at(weights, seeds, positions, steps, purpose):
    tokens, size = torch.empty_like(positions), weights.shape[-1]
    yield tokens
    place = seeds, positions, steps, tokens, key_of(purpose), positions.shape[1]
    sample_at_kernel[(positions.numel(),)](weights, *place, size, **_blocks(size), num_warps=8)


def race_at(weights, seeds, positions, steps, purpose):
    tokens, size = torch.empty_like(positions), weights.shape[-1]
    yield tokens
    place = seeds, positions, steps, tokens, key_of(purpose), positions.shape[1]
    block = min(1024, triton.next_power_of_2(triton.cdiv(size, 2)))
    race_at_kernel[(positions.numel(),)](weights, *place, size, block=block, num_warps=8)


def couple_at(p, q, x, seeds, positions, steps, purpose):
    y, kept, size = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool), p.shape[-1]
    noise = torch.empty(*x.shape, 3, dtype=torch.float32, device=x.device)
    yield y, kept, noise
    place = seeds, positions, steps, y, kept.view(torch.uint8), noise, key_of(purpose)
    couple_at_kernel[(x.numel(),)](p, q, x, *place, x.numel() // len(seeds), size, **_blocks(size), num_warps=8)


def _launch(p, q, x, noise, y, kept, live=None, leading=None):
    noise, live, size = noise_rows(noise), None if live is None else live.view(torch.uint8), p.shape[-1]
    sizes = x.shape[-1] if x.ndim else 1, size, noise.stride(0)
    options = {"counts": live is not None, **_blocks(size), "num_warps": 8}
    couple_kernel[(x.numel(),)](p, q, x, noise, live, y, kept.view(torch.uint8), leading, *sizes, **options)


def couple(p, q, x, noise):
    y, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    yield y, kept
    _launch(p, q, x, noise, y, kept)


def couple_window(p, q, x, noise, live, leading):
    y, kept = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    yield y, kept
    _launch(p, q, x, noise, y, kept, live, leading)
