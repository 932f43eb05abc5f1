"""Queries, keys and values in Triton: a program takes some pairs of channels of one head, and all tokens."""

import torch
import triton
import triton.language as tl

from ..linear.triton import tile
from ..programs import (
    BLOCK_WIDTH,
    NORM_ROWS,
    WARPS,
    block_rows,
    channels_of_parts,
    gained,
    load_channels,
    norm_factor,
    sum_of_parts,
)


# Of channels, per program.
PAIRS = 16


@triton.jit(do_not_specialize=["rows", "count", "queries", "positions"])
def qkv_kernel(
    x_ptr,
    gain_ptr,
    factor_ptr,
    weight_ptr,
    scale_ptr,
    table_ptr,
    position_ptr,
    index_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    rows,
    count,
    queries,
    positions,
    places,
    eps,
    width: tl.constexpr,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_rows: tl.constexpr,
    block_pairs: tl.constexpr,
    block_width: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
):
    blocks: tl.constexpr = head_dim // 2 // block_pairs
    head = tl.program_id(0) // blocks
    pair = tl.program_id(0) % blocks * block_pairs + tl.arange(0, block_pairs)
    row = head * head_dim + tl.program_id(0) % blocks * 2 * block_pairs + tl.arange(0, 2 * block_pairs)
    token = tl.arange(0, block_rows)
    inside = token < rows
    x_ptr += (token * width)[None, :, None]
    weight_ptr += (row.to(tl.int64) * width)[None, :, None]
    sums = tl.full([parts, 2 * block_pairs, block_rows], 0.0, tl.float32)
    squares = tl.full([parts, block_rows, block_width // parts], 0.0, tl.float32)
    channel = channels_of_parts(block_width, parts)
    # What is needed last is loaded first, while the weights are on their way.
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + token, mask=inside, other=0.0)
    position = tl.load(position_ptr + token % count, mask=inside, other=0)
    if key_heads > 0:
        place = tl.load(index_ptr + token % count, mask=inside & (head >= heads), other=0)
    for start in tl.range(0, width, block_width, num_stages=stages):
        at = start + channel
        x = load_channels(x_ptr, at, width, block_width, inside[None, :, None])
        if gain_ptr is not None:
            full = x.to(tl.float32)
            squares = tl.fma(full, full, squares)
            x = (full * load_channels(gain_ptr, at, width, block_width).to(tl.float32)).to(x.dtype)
        weight = load_channels(weight_ptr, at, width, block_width).to(x.dtype)
        sums = tl.dot(weight, tl.permute(x, (0, 2, 1)), sums, input_precision="ieee")
    sums = sum_of_parts(sums)
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + row)[:, None]
    if gain_ptr is not None:
        factor = norm_factor(squares, width, eps)
    dtype = x_ptr.dtype.element_ty
    sums = (sums * factor[None]).to(dtype).to(tl.float32)
    left, right = tl.permute(sums.reshape(block_pairs, 2, block_rows), (0, 2, 1)).split()
    position = tl.where(position < 0, positions - 1, position)
    table = table_ptr + position[None] * head_dim + 2 * pair[:, None]
    # Values are not turned.
    turns = inside[None] & (head < heads + key_heads)
    cos = tl.load(table, mask=turns, other=1.0)
    sin = tl.load(table + 1, mask=turns, other=0.0)
    rotated = left * cos - right * sin
    right = right * cos + left * sin
    left = rotated
    channel = 2 * pair[:, None]
    if heads > 0:
        out = query_ptr + (token[None] * heads + head) * head_dim + channel
        asks = inside & (head < heads)
        tl.store(out, left.to(dtype), mask=asks[None])
        tl.store(out + 1, right.to(dtype), mask=asks[None])
    if key_heads > 0:
        # Both are written without a branch over pointers.
        is_key = inside & (head >= heads) & (head < heads + key_heads)
        is_value = inside & (head >= heads + key_heads)
        key_head = (head - heads) % key_heads
        at = ((token // queries * key_heads + key_head).to(tl.int64) * places + place) * head_dim
        at = at[None] + channel
        tl.store(keys_ptr + at, left.to(dtype), mask=is_key[None])
        tl.store(keys_ptr + at + 1, right.to(dtype), mask=is_key[None])
        tl.store(values_ptr + at, left.to(dtype), mask=is_value[None])
        tl.store(values_ptr + at + 1, right.to(dtype), mask=is_value[None])


def qkv(x, gain, eps, weight, table, positions, head_dim, keys, values, index, scale):
    rows, (cached, key_heads, places, _) = len(x), (len(x), 0, 0, 0) if keys is None else keys.shape
    heads = len(weight) // head_dim - 2 * key_heads
    query = torch.empty(rows, heads, head_dim, dtype=x.dtype, device=x.device)
    yield query
    factor = None
    if rows > NORM_ROWS:
        (x, factor), gain = gained(x, gain, eps), None
    tensors = x, gain, factor, weight, scale, table, positions, index, query, keys, values
    sizes = rows, len(positions), rows // cached, len(table), places
    blocks = {"block_rows": block_rows(rows), "block_pairs": PAIRS, "block_width": BLOCK_WIDTH, "parts": WARPS}
    blocks["stages"] = tile(rows, PAIRS, True)["stages"]
    heads_of = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    grid = ((heads + 2 * key_heads) * (head_dim // 2 // PAIRS),)
    qkv_kernel[grid](*tensors, *sizes, eps, width=x.shape[1], **heads_of, **blocks, num_warps=WARPS)


def queries(x, gain, eps, weight, table, positions, head_dim, scale):
    yield from qkv(x, gain, eps, weight, table, positions, head_dim, None, None, None, scale)
