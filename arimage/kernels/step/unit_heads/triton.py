"""Queries and keys of one length in Triton: a program takes some heads of a token."""

import torch
import triton
import triton.language as tl

from ..programs import WARPS


HEADS = 8


@triton.jit
def _unit(even, odd, length):
    # As `F.normalize`, whose least norm is 1e-12.
    factor = length / tl.sqrt_rn(tl.sum(even * even + odd * odd, axis=1) + 1e-24)
    return even * factor[:, None], odd * factor[:, None]


@triton.jit(do_not_specialize=["first", "tokens"])
def unit_heads_kernel(
    states_ptr,
    log_scale_ptr,
    table_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    first,
    tokens,
    places,
    table_stride,
    length,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
    block_pairs: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    pair = tl.arange(0, block_pairs)[None]
    inside = (head < heads) & (pair < head_dim // 2)
    channel = head * head_dim + 2 * pair
    states_ptr += token * 3 * heads * head_dim
    query_even = tl.load(states_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    query_odd = tl.load(states_ptr + channel + 1, mask=inside, other=0.0).to(tl.float32)
    states_ptr += heads * head_dim
    key_even = tl.load(states_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    key_odd = tl.load(states_ptr + channel + 1, mask=inside, other=0.0).to(tl.float32)
    states_ptr += heads * head_dim
    value_even = tl.load(states_ptr + channel, mask=inside, other=0.0)
    value_odd = tl.load(states_ptr + channel + 1, mask=inside, other=0.0)
    query_even, query_odd = _unit(query_even, query_odd, length)
    key_even, key_odd = _unit(key_even, key_odd, length)
    row, own = token // tokens, token % tokens
    if table_ptr is not None:
        table = table_ptr + row * table_stride + own * head_dim + 2 * pair
        cos = tl.load(table, mask=pair < head_dim // 2, other=0.0)
        sin = tl.load(table + 1, mask=pair < head_dim // 2, other=0.0)
        turned = query_even * cos - query_odd * sin
        query_odd = query_odd * cos + query_even * sin
        query_even = turned
        turned = key_even * cos - key_odd * sin
        key_odd = key_odd * cos + key_even * sin
        key_even = turned
    # The logarithm of 100.
    log_scale = tl.load(log_scale_ptr + head, mask=head < heads, other=0.0).to(tl.float32)
    scale = tl.exp(tl.minimum(log_scale, 4.605170185988092))
    dtype = query_ptr.dtype.element_ty
    query_ptr += token * heads * head_dim + channel
    tl.store(query_ptr, (query_even * scale).to(dtype), mask=inside)
    tl.store(query_ptr + 1, (query_odd * scale).to(dtype), mask=inside)
    at = ((row * heads + head) * places + first + own) * head_dim + 2 * pair
    dtype = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + at, key_even.to(dtype), mask=inside)
    tl.store(keys_ptr + at + 1, key_odd.to(dtype), mask=inside)
    tl.store(values_ptr + at, value_even.to(dtype), mask=inside)
    tl.store(values_ptr + at + 1, value_odd.to(dtype), mask=inside)


def unit_heads(states, log_scale, length, keys, values, first, table):
    rows, tokens, _, heads, head_dim = states.shape
    query = torch.empty(rows, tokens, heads, head_dim, dtype=states.dtype, device=states.device)
    yield query
    stride = 0 if table is None or len(table) == 1 else table.stride(0)
    tensors, sizes = (states, log_scale, table, query, keys, values), (first, tokens, keys.shape[2], stride, length)
    options = {"heads": heads, "head_dim": head_dim, "block_heads": HEADS, "num_warps": WARPS}
    grid, pairs = (rows * tokens, triton.cdiv(heads, HEADS)), triton.next_power_of_2(head_dim // 2)
    unit_heads_kernel[grid](*tensors, *sizes, **options, block_pairs=pairs)
