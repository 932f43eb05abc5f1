"""Siblings in Triton: one program per position tries the drafts in turn on copies of the distributions."""

import torch
import triton
import triton.language as tl
from torch import library

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


@library.custom_op("arimage::sample_siblings", mutates_args=())
def _sample_siblings(q: torch.Tensor, noise: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    vocab_size, count = q.shape[-1], noise.shape[1]
    tokens = torch.empty(*q.shape[:-1], count + (first is not None), dtype=torch.long, device=q.device)
    left = torch.empty_like(q)
    with torch.cuda.device_of(q):
        sample_siblings_kernel[(len(noise),)](
            q,
            noise,
            first,
            left,
            tokens,
            vocab_size,
            count,
            noise.stride(0),
            begun=first is not None,
            **_blocks(vocab_size),
            num_warps=8,
        )
    return tokens


@_sample_siblings.register_fake
def _(q, noise, first):
    return torch.empty(*q.shape[:-1], noise.shape[1] + (first is not None), dtype=torch.long, device=q.device)


def sample_siblings(
    q: torch.FloatTensor, noise: torch.FloatTensor, first: torch.LongTensor | None
) -> torch.LongTensor:
    return _sample_siblings(q.contiguous(), noise_rows(noise), None if first is None else first.contiguous())


@library.custom_op("arimage::couple_siblings", mutates_args=())
def _couple_siblings(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, noise: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    y, which = torch.empty_like(x[..., 0]), torch.empty_like(x[..., 0])
    rest, left = torch.empty_like(p), torch.empty_like(q)
    vocab_size = p.shape[-1]
    with torch.cuda.device_of(p):
        couple_siblings_kernel[(len(noise),)](
            p,
            q,
            x,
            noise,
            rest,
            left,
            y,
            which,
            vocab_size,
            x.shape[-1],
            noise.stride(0),
            **_blocks(vocab_size),
            # With 8, registers spill on an A100.
            num_warps=16,
        )
    return y, which


@_couple_siblings.register_fake
def _(p, q, x, noise):
    return torch.empty_like(x[..., 0]), torch.empty_like(x[..., 0])


def couple_siblings(
    p: torch.FloatTensor, q: torch.FloatTensor, x: torch.LongTensor, noise: torch.FloatTensor
) -> tuple[torch.LongTensor, torch.LongTensor]:
    return _couple_siblings(p.contiguous(), q.contiguous(), x.contiguous(), noise_rows(noise))
