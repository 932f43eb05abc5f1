"""Norms and rotations of heads in Triton: a program takes some heads of a token."""

import torch
import triton
import triton.language as tl

from ..programs import WARPS, turned_heads


HEADS = 8


@triton.jit(do_not_specialize=["rotated"])
def head_norms_kernel(
    states_ptr,
    query_gain_ptr,
    key_gain_ptr,
    table_ptr,
    out_ptr,
    rotated,
    eps,
    stride: tl.constexpr,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_heads: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    channel = tl.arange(0, block_dim)[None]
    inside = head < heads + key_heads
    gain = tl.where(head < heads, query_gain_ptr, key_gain_ptr)
    states = states_ptr + token * stride + head * head_dim
    states = turned_heads(
        states, inside, gain, None, eps, table_ptr, token % rotated, head_dim, block_dim, True, head_dim, False
    )
    out = out_ptr + (token * (heads + key_heads) + head) * head_dim + channel
    tl.store(out, states.to(out_ptr.dtype.element_ty), mask=inside & (channel < head_dim))


def head_norms(states, query_gain, key_gain, eps, heads, table):
    rows, tokens, all_heads, head_dim = states.shape
    own = (all_heads - heads) // 2
    out = torch.empty(rows, tokens, heads + own, head_dim, dtype=states.dtype, device=states.device)
    yield out
    sizes = {"stride": all_heads * head_dim, "heads": heads, "key_heads": own, "head_dim": head_dim}
    blocks = {"block_dim": triton.next_power_of_2(head_dim), "block_heads": HEADS, "num_warps": WARPS}
    grid, rotated = (rows * tokens, triton.cdiv(heads + own, HEADS)), len(table) * tokens
    head_norms_kernel[grid](states, query_gain, key_gain, table, out, rotated, eps, **sizes, **blocks)
