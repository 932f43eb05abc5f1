"""Siblings in Triton: one program per position tries the drafts in turn on copies of the distributions."""

import torch
import triton
import triton.language as tl

from ..coupling.triton import _blocks, _sample, noise_rows


@triton.jit
def _copy(source_ptr, target_ptr, vocab_size, block: tl.constexpr):
    for start in range(0, vocab_size, block):
        tokens = start + tl.arange(0, block)
        values = tl.load(source_ptr + tokens, mask=tokens < vocab_size, other=0.0).to(tl.float32)
        tl.store(target_ptr + tokens, values, mask=tokens < vocab_size)
    tl.debug_barrier()


@triton.jit
def sample_siblings_kernel(
    q_ptr,
    noise_ptr,
    first_ptr,
    left_ptr,
    out_ptr,
    vocab_size,
    count,
    noise_stride,
    begun: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """`left_ptr`: memory for the remaining q. `begun`: whether there is a `first_ptr`."""
    place = tl.program_id(0).to(tl.int64)
    left_ptr += place * vocab_size
    noise_ptr += place * noise_stride
    out_ptr += place * (count + begun)
    _copy(q_ptr + place * vocab_size, left_ptr, vocab_size, block)
    if begun:
        first = tl.load(first_ptr + place)
        tl.store(out_ptr, first)
        tl.store(left_ptr + first, 0.0)
        tl.debug_barrier()
    for k in range(count):
        token = _sample(left_ptr, left_ptr, 0, tl.load(noise_ptr + k), vocab_size, block, blocks)
        exists = tl.load(left_ptr + token) > 0
        tl.store(out_ptr + begun + k, tl.where(exists, token, -1).to(tl.int64))
        # All threads have read the weight before it is overwritten, and read again afterwards.
        tl.debug_barrier()
        tl.store(left_ptr + token, 0.0)
        tl.debug_barrier()


@triton.jit
def couple_siblings_kernel(
    p_ptr,
    q_ptr,
    x_ptr,
    noise_ptr,
    rest_ptr,
    left_ptr,
    y_ptr,
    which_ptr,
    vocab_size,
    count,
    noise_stride,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    """`rest_ptr` and `left_ptr`: memory for the remaining p and q."""
    place = tl.program_id(0).to(tl.int64)
    rest_ptr += place * vocab_size
    left_ptr += place * vocab_size
    x_ptr += place * count
    noise_ptr += place * noise_stride
    _copy(p_ptr + place * vocab_size, rest_ptr, vocab_size, block)
    _copy(q_ptr + place * vocab_size, left_ptr, vocab_size, block)
    which = -1
    for k in range(count):
        token = tl.load(x_ptr + k)
        if (which < 0) & (token >= 0):
            if tl.load(noise_ptr + k) * tl.load(left_ptr + token) < tl.load(rest_ptr + token):
                which = k
            else:
                residual = tl.full([block], 0.0, tl.float32)
                others = tl.full([block], 0.0, tl.float32)
                for start in range(0, vocab_size, block):
                    tokens = start + tl.arange(0, block)
                    p = tl.load(rest_ptr + tokens, mask=tokens < vocab_size, other=0.0)
                    q = tl.load(left_ptr + tokens, mask=tokens < vocab_size, other=0.0)
                    residual += tl.maximum(p - q, 0.0)
                    others += tl.where(tokens == token, 0.0, q)
                total = tl.sum(residual)
                remaining = tl.sum(others)
                remaining = tl.where(remaining > 0, remaining, 1.0)
                tl.debug_barrier()
                for start in range(0, vocab_size, block):
                    tokens = start + tl.arange(0, block)
                    p = tl.load(rest_ptr + tokens, mask=tokens < vocab_size, other=0.0)
                    q = tl.load(left_ptr + tokens, mask=tokens < vocab_size, other=0.0)
                    rest = tl.where(total > 0, tl.math.div_rn(tl.maximum(p - q, 0.0), total), p)
                    tl.store(rest_ptr + tokens, rest, mask=tokens < vocab_size)
                    left = tl.math.div_rn(tl.where(tokens == token, 0.0, q), remaining)
                    tl.store(left_ptr + tokens, left, mask=tokens < vocab_size)
                tl.debug_barrier()
    if which >= 0:
        y = tl.load(x_ptr + which)
    else:
        uniform = tl.load(noise_ptr + count)
        y = _sample(rest_ptr, rest_ptr, 0, uniform, vocab_size, block, blocks).to(tl.int64)
    tl.store(y_ptr + place, y)
    tl.store(which_ptr + place, which)


def sample_siblings(q, noise, first):
    begun, size = first is not None, q.shape[-1]
    tokens = torch.empty(*q.shape[:-1], noise.shape[-1] + begun, dtype=torch.long, device=q.device)
    yield tokens
    noise = noise_rows(noise)
    memory = first, torch.empty_like(q), tokens
    count, options = noise.shape[1], {"begun": begun, **_blocks(size), "num_warps": 8}
    sample_siblings_kernel[(len(noise),)](q, noise, *memory, size, count, noise.stride(0), **options)


def couple_siblings(p, q, x, noise):
    y, which = (torch.empty(x.shape[:-1], dtype=torch.long, device=x.device) for _ in range(2))
    yield y, which
    noise, size = noise_rows(noise), p.shape[-1]
    memory = (torch.empty_like(p), torch.empty_like(q), y, which)
    # With 8 warps, registers spill on an A100.
    options = {**_blocks(size), "num_warps": 16}
    couple_siblings_kernel[(len(noise),)](p, q, x, noise, *memory, size, x.shape[-1], noise.stride(0), **options)
