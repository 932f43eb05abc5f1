"""The rotation in Triton: one pass over the states, whatever their strides."""

import torch
import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    states_ptr,
    table_ptr,
    out_ptr,
    length,
    heads,
    width,
    stride_row,
    stride_token,
    stride_head,
    table_row,
    table_token,
    block_heads: tl.constexpr,
    block_pairs: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row, token = place // length, place % length
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    pair = tl.arange(0, block_pairs)[None]
    inside = (head < heads) & (pair < width // 2)
    states = states_ptr + row * stride_row + token * stride_token + head * stride_head + 2 * pair
    even = tl.load(states, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(states + 1, mask=inside, other=0.0).to(tl.float32)
    table = table_ptr + row * table_row + token * table_token + 2 * pair
    cos = tl.load(table, mask=pair < width // 2, other=0.0)
    sin = tl.load(table + 1, mask=pair < width // 2, other=0.0)
    out = out_ptr + (place * heads + head) * width + 2 * pair
    tl.store(out, (even * cos - odd * sin).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out + 1, (odd * cos + even * sin).to(out_ptr.dtype.element_ty), mask=inside)


def rotate(states, table):
    rows, length, heads, width = states.shape
    out = torch.empty_like(states, memory_format=torch.contiguous_format)
    yield out
    if states.stride(-1) != 1:
        states = states.contiguous()
    strides = *states.stride()[:3], table.stride(0) if len(table) > 1 else 0, table.stride(1)
    blocks = {"block_heads": 16, "block_pairs": triton.next_power_of_2(width // 2)}
    grid = rows * length, triton.cdiv(heads, 16)
    rotate_kernel[grid](states, table, out, length, heads, width, *strides, **blocks)
