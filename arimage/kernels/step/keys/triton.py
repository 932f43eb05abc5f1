"""Keys and values in Triton: a program takes some heads of a row."""

import triton
import triton.language as tl

from ..programs import WARPS, turned_heads


HEADS = 8


@triton.jit(do_not_specialize=["count", "rotated", "queries", "positions", "places"])
def keys_kernel(
    key_ptr,
    value_ptr,
    table_ptr,
    position_ptr,
    index_ptr,
    keys_ptr,
    values_ptr,
    count,
    rotated,
    queries,
    positions,
    places,
    key_stride: tl.constexpr,
    value_stride: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    turned: tl.constexpr,
    halves: tl.constexpr,
    block_heads: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    inside = head < key_heads
    channel = tl.arange(0, head_dim)[None]
    value = tl.load(value_ptr + token * value_stride + head * head_dim + channel, mask=inside, other=0.0)
    position = tl.load(position_ptr + token % rotated)
    position = tl.where(position < 0, positions - 1, position)
    key = key_ptr + token * key_stride + head * head_dim
    key = turned_heads(key, inside, None, None, 0.0, table_ptr, position, head_dim, head_dim, False, turned, halves)
    row = (token // queries * key_heads + head) * places
    at = (row + tl.load(index_ptr + token % count)) * head_dim + channel
    tl.store(keys_ptr + at, key.to(keys_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + at, value, mask=inside)


def write_keys(key, value, table, positions, keys, values, index, halves):
    yield
    rows, (cached, key_heads, places, head_dim) = len(key), keys.shape
    tensors = key, value, table, positions, index, keys, values
    sizes = len(index), len(positions), rows // cached, len(table), places
    strides = {"key_stride": key.stride(0), "value_stride": value.stride(0)}
    options = {"key_heads": key_heads, "head_dim": head_dim, "turned": 2 * table.shape[1], "halves": halves}
    grid = (rows, triton.cdiv(key_heads, HEADS))
    keys_kernel[grid](*tensors, *sizes, **strides, **options, block_heads=HEADS, num_warps=WARPS)
