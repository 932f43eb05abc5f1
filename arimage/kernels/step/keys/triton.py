"""Keys and values in Triton: a program takes some heads of a row."""

import triton
import triton.language as tl

from ..programs import WARPS, rotated


HEADS = 8


@triton.jit(do_not_specialize=["count", "queries", "positions", "places"])
def keys_kernel(
    states_ptr,
    table_ptr,
    position_ptr,
    index_ptr,
    keys_ptr,
    values_ptr,
    count,
    queries,
    positions,
    places,
    stride: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_heads: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)
    inside = (head < key_heads)[:, None]
    channel = tl.arange(0, head_dim)
    states = states_ptr + token.to(tl.int64) * stride + head[:, None] * head_dim + channel[None]
    key = tl.load(states, mask=inside, other=0.0)
    value = tl.load(states + key_heads * head_dim, mask=inside, other=0.0)
    position = tl.load(position_ptr + token % count)
    position = tl.where(position < 0, positions - 1, position)
    turns = tl.load(table_ptr + position * head_dim + channel)[None]
    row = (token // queries * key_heads + head).to(tl.int64) * places
    at = (row[:, None] + tl.load(index_ptr + token % count)) * head_dim + channel[None]
    tl.store(keys_ptr + at, rotated(key, turns), mask=inside)
    tl.store(values_ptr + at, value, mask=inside)


def write_keys(states, table, positions, keys, values, index):
    yield
    rows, (cached, key_heads, places, head_dim) = len(states), keys.shape
    tensors, sizes = (
        (states, table, positions, index, keys, values),
        (len(positions), rows // cached, len(table), places),
    )
    options = {"stride": states.stride(0), "key_heads": key_heads, "head_dim": head_dim, "block_heads": HEADS}
    keys_kernel[(rows, triton.cdiv(key_heads, HEADS))](*tensors, *sizes, **options, num_warps=WARPS)
