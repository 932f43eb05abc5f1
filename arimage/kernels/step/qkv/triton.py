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
    tuned,
)


# Of channels, per program.
PAIRS = 16


@triton.jit(do_not_specialize=["rows", "count", "rotated", "queries", "positions"])
def qkv_kernel(
    x_ptr,
    gain_ptr,
    factor_ptr,
    query_weight_ptr,
    key_weight_ptr,
    value_weight_ptr,
    query_scale_ptr,
    key_scale_ptr,
    value_scale_ptr,
    query_bias_ptr,
    key_bias_ptr,
    value_bias_ptr,
    table_ptr,
    position_ptr,
    index_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    rows,
    count,
    rotated,
    queries,
    positions,
    places,
    eps,
    width: tl.constexpr,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    turned: tl.constexpr,
    halves: tl.constexpr,
    block_rows: tl.constexpr,
    block_pairs: tl.constexpr,
    block_width: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
):
    blocks: tl.constexpr = head_dim // 2 // block_pairs
    head = tl.program_id(1) // blocks
    pair = tl.program_id(1) % blocks * block_pairs + tl.arange(0, block_pairs)
    # Pairs of channels lie next to each other in a tile, wherever they are in a head.
    item = tl.arange(0, 2 * block_pairs)
    each, side = tl.program_id(1) % blocks * block_pairs + item // 2, item % 2
    if halves:
        half: tl.constexpr = turned // 2
        left_channel = tl.where(pair < half, pair, 2 * pair)
        apart = tl.where(pair < half, half, 1)
        row = tl.where(each < half, each + half * side, 2 * each + side)
    else:
        left_channel = 2 * pair
        apart = tl.full([block_pairs], 1, tl.int32)
        row = 2 * each + side
    is_query, is_key = head < heads, (head >= heads) & (head < heads + key_heads)
    own = tl.where(is_query, head, (head - heads) % tl.maximum(key_heads, 1))
    row += own * head_dim
    weight_ptr = tl.where(is_query, query_weight_ptr, tl.where(is_key, key_weight_ptr, value_weight_ptr))
    token = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = token < rows
    x_ptr += (token * width)[None, :, None]
    # Compilers do not see that the rows of all weights begin at multiples of 16 bytes.
    weight_ptr = tl.multiple_of(weight_ptr + row.to(tl.int64) * width, 16)[None, :, None]
    sums = tl.full([parts, 2 * block_pairs, block_rows], 0.0, tl.float32)
    squares = tl.full([parts, block_rows, block_width // parts], 0.0, tl.float32)
    channel = channels_of_parts(block_width, parts)
    # What is needed last is loaded first, while the weights are on their way.
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + token, mask=inside, other=0.0)
    if table_ptr is not None:
        position = tl.load(position_ptr + token % rotated, mask=inside, other=0)
    if keys_ptr is not None:
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
    if query_scale_ptr is not None:
        scale_ptr = tl.where(is_query, query_scale_ptr, tl.where(is_key, key_scale_ptr, value_scale_ptr))
        sums *= tl.load(scale_ptr + row)[:, None]
    if gain_ptr is not None:
        factor = norm_factor(squares, width, eps)
    dtype = x_ptr.dtype.element_ty
    sums *= factor[None]
    if query_bias_ptr is not None:
        bias_ptr = tl.where(is_query, query_bias_ptr, tl.where(is_key, key_bias_ptr, value_bias_ptr))
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    sums = sums.to(dtype).to(tl.float32)
    left, right = tl.permute(sums.reshape(block_pairs, 2, block_rows), (0, 2, 1)).split()
    if table_ptr is not None:
        position = tl.where(position < 0, positions - 1, position)
        table = table_ptr + position[None] * turned + 2 * pair[:, None]
        # Values are not turned.
        turns = inside[None] & (head < heads + key_heads) & (pair < turned // 2)[:, None]
        cos = tl.load(table, mask=turns, other=1.0)
        sin = tl.load(table + 1, mask=turns, other=0.0)
        turned_left = left * cos - right * sin
        right = right * cos + left * sin
        left = turned_left
    channel, apart = left_channel[:, None], apart[:, None]
    # What is not turned is not written to the cache.
    kept: tl.constexpr = heads if keys_ptr is not None else heads + 2 * key_heads
    if kept > 0:
        out = query_ptr + (token[None] * kept + head) * head_dim + channel
        asks = inside & (head < kept)
        tl.store(out, left.to(dtype), mask=asks[None])
        tl.store(out + apart, right.to(dtype), mask=asks[None])
    if keys_ptr is not None:
        # Both are written without a branch over pointers.
        is_value = inside & (head >= heads + key_heads)
        key_head = (head - heads) % key_heads
        at = ((token // queries * key_heads + key_head).to(tl.int64) * places + place) * head_dim
        at = at[None] + channel
        tl.store(keys_ptr + at, left.to(dtype), mask=(inside & is_key)[None])
        tl.store(keys_ptr + at + apart, right.to(dtype), mask=(inside & is_key)[None])
        tl.store(values_ptr + at, left.to(dtype), mask=is_value[None])
        tl.store(values_ptr + at + apart, right.to(dtype), mask=is_value[None])


def qkv(x, gain, eps, weights, table, positions, head_dim, keys, values, index, scales, biases, halves):
    cached, key_heads, places, _ = keys.shape
    heads = sum(map(len, weights)) // head_dim - 2 * key_heads
    query = torch.empty(len(x), heads, head_dim, dtype=x.dtype, device=x.device)
    yield query
    turns, sizes = (table, positions, halves), (heads, key_heads, head_dim)
    _launch(
        x, gain, eps, weights, scales, biases, turns, sizes, (query, keys, values), index, len(x) // cached, places
    )


def unturned(x, gain, eps, weights, head_dim, scales, biases):
    heads = [len(weight) // head_dim for weight in weights]
    states = torch.empty(len(x), sum(heads), head_dim, dtype=x.dtype, device=x.device)
    yield states
    sizes = (*heads[:2], head_dim) if len(heads) > 1 else (*heads, 0, head_dim)
    _launch(x, gain, eps, weights, scales, biases, (None, None, False), sizes, (states, None, None))


def queries(x, gain, eps, weight, table, positions, head_dim, scale):
    query = torch.empty(len(x), len(weight) // head_dim, head_dim, dtype=x.dtype, device=x.device)
    yield query
    scales, sizes = [] if scale is None else [scale], (query.shape[1], 0, head_dim)
    _launch(x, gain, eps, [weight], scales, [], (table, positions, False), sizes, (query, None, None))


def _launch(x, gain, eps, weights, scales, biases, turns, sizes, found, index=None, queries=1, places=0):
    rows, (table, positions, halves), (heads, key_heads, head_dim) = len(x), turns, sizes
    blocks = {"block_rows": block_rows(rows), "block_pairs": PAIRS, "block_width": BLOCK_WIDTH, "parts": WARPS}
    blocks |= {"stages": tile(rows, PAIRS, True)["stages"], "num_warps": WARPS}
    blocks |= tuned("qkv", (heads, key_heads, head_dim, x.shape[1], weights[0].dtype), rows, x.device)
    factor = None
    if rows > NORM_ROWS:
        (x, factor), gain = gained(x, gain, eps, blocks["block_width"], blocks["parts"]), None
    sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
    parts = [part for each in (weights, scales, biases) for part in _of_each(each, sizes)]
    tensors = x, gain, factor, *parts, table, positions, index, *found
    counts = (1 if each is None else len(each) for each in (index, positions))
    turned = head_dim if table is None else 2 * table.shape[1]
    sizes = rows, *counts, queries, 0 if table is None else len(table), places
    heads_of = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim, "turned": turned, "halves": halves}
    grid = triton.cdiv(rows, blocks["block_rows"]), (heads + 2 * key_heads) * (head_dim // 2 // blocks["block_pairs"])
    qkv_kernel[grid](*tensors, *sizes, eps, width=x.shape[1], **heads_of, **blocks)


def _of_each(tensors, sizes):
    """What belongs to queries, to keys and to values, of one tensor for all three or one for each; None of none."""
    if not tensors:
        return [None] * 3
    return tensors[0].split(sizes) if len(tensors) == 1 else tensors
