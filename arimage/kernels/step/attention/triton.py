"""Attention in Triton: a program takes a row, a head of the keys, and some queries."""

import torch
import triton
import triton.language as tl

from ..programs import WARPS, sum_of_parts, tuned, turned_heads


# Of a warp, at a time.
KEYS = 16
# Per program: as many as a tile of tensor cores has rows. More would spill registers.
QUERIES = 16


_COUNTS = ["count", "rotated", "queries", "prompt", "prefix_end", "first", "slots", "positions", "columns"]


@triton.jit(do_not_specialize=_COUNTS)
def attention_kernel(
    query_ptr,
    keys_ptr,
    values_ptr,
    seen_ptr,
    slot_ptr,
    end_ptr,
    visible_ptr,
    table_ptr,
    position_ptr,
    index_ptr,
    query_gain_ptr,
    query_bias_ptr,
    key_gain_ptr,
    key_bias_ptr,
    out_ptr,
    count,
    rotated,
    queries,
    places,
    prompt,
    prefix_end,
    first,
    slots,
    positions,
    columns,
    scale,
    eps,
    stride: tl.constexpr,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    turned: tl.constexpr,
    halves: tl.constexpr,
    query_gain_stride: tl.constexpr,
    key_gain_stride: tl.constexpr,
    block_prompt: tl.constexpr,
    block_queries: tl.constexpr,
    block_keys: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
):
    group: tl.constexpr = heads // key_heads
    row = tl.program_id(0) // key_heads
    key_head = tl.program_id(0) % key_heads
    # Heads that share keys are queries of one head.
    folded = tl.program_id(1) * block_queries + tl.arange(0, block_queries)
    query = folded // group
    inside = query < queries
    channel = tl.arange(0, block_dim)
    of_head = channel < head_dim
    token = row * queries + query
    head = (key_head * group + folded % group)[:, None]
    states = query_ptr + token[:, None] * stride + head * head_dim
    word = tl.arange(0, block_prompt)
    seen_ptr += row * prompt
    seen = tl.load(seen_ptr + word, mask=word < prompt, other=0)
    # Nothing is read before the first word that is seen.
    start = prefix_end - prompt + tl.min(tl.where(seen != 0, word, prompt))
    # Where the query lies among those of its group.
    given = row * queries % count + query
    if query_gain_ptr is None and table_ptr is None:
        q = tl.load(states + channel[None], mask=inside[:, None] & of_head[None], other=0.0)
    else:
        position = tl.full([block_queries, 1], 0, tl.int64)
        if table_ptr is not None:
            position = tl.load(position_ptr + row * queries % rotated + query, mask=inside, other=0)[:, None]
            position = tl.where(position < 0, positions - 1, position)
        gain, bias = query_gain_ptr, query_bias_ptr
        if query_gain_stride:
            gain += head * query_gain_stride
        if query_bias_ptr is not None:
            bias += head * query_gain_stride
        q = turned_heads(
            states, inside[:, None], gain, bias, eps, table_ptr, position, head_dim, block_dim, turned, halves
        )
        q = q.to(query_ptr.dtype.element_ty)
    slot = tl.load(slot_ptr + given, mask=inside, other=0).to(tl.int32)
    end = tl.minimum(first + tl.max(slot) + 1, places)
    shown, last_end = tl.full([block_queries], 0, tl.int32), 0
    if end_ptr is not None:
        # How many row ends each query sees, and the most.
        shown = tl.load(end_ptr + given, mask=inside, other=0).to(tl.int32) // columns
        last_end = tl.max(shown)
    block: tl.constexpr = parts * block_keys
    if visible_ptr is not None:
        visible_ptr += given[:, None] * slots
        end = prefix_end
        for begin in tl.range(prefix_end, places, block):
            key = begin + tl.arange(0, block)
            item = tl.where(key < first, places - first + key - prefix_end, key - first)
            known = inside[:, None] & ((key < places) & (item < slots))[None]
            told = tl.load(visible_ptr + item[None], mask=known, other=0) != 0
            end = tl.maximum(end, tl.max(tl.max(tl.where(told, key[None] + 1, 0), axis=1)))
    base = (row * key_heads + key_head).to(tl.int64) * places * head_dim
    keys_ptr += base
    values_ptr += base
    if key_gain_ptr is not None:
        # Every program writes the keys and values of this step that it reads. Others write the same numbers.
        gain, bias = key_gain_ptr + key_head * key_gain_stride, key_bias_ptr
        if key_bias_ptr is not None:
            bias += key_head * key_gain_stride
        for begin in tl.range(0, queries, block_queries):
            new = (begin + tl.arange(0, block_queries))[:, None]
            fed = new < queries
            position = tl.full([block_queries, 1], 0, tl.int64)
            if table_ptr is not None:
                position = tl.load(position_ptr + row * queries % rotated + new, mask=fed, other=0)
                position = tl.where(position < 0, positions - 1, position)
            states = query_ptr + (row * queries + new) * stride + (heads + key_head) * head_dim
            k = turned_heads(states, fed, gain, bias, eps, table_ptr, position, head_dim, block_dim, turned, halves)
            place = tl.load(index_ptr + row * queries % count + new, mask=fed, other=0)
            states += key_heads * head_dim
            v = tl.load(states + channel[None], mask=fed & of_head[None], other=0.0)
            at = place * head_dim + channel[None]
            tl.store(keys_ptr + at, k.to(keys_ptr.dtype.element_ty), mask=fed & of_head[None])
            tl.store(values_ptr + at, v, mask=fed & of_head[None])
        tl.debug_barrier()
    part = tl.arange(0, parts)[:, None] * block_keys + tl.arange(0, block_keys)[None]
    q = tl.broadcast_to(q[None], parts, block_queries, block_dim)
    highest = tl.full([parts, block_queries], -float("inf"), tl.float32)
    total = tl.full([parts, block_queries], 0.0, tl.float32)
    sums = tl.full([parts, block_queries, block_dim], 0.0, tl.float32)
    for begin in tl.range(start // block * block, end, block, num_stages=stages):
        key = begin + part
        at = key[:, :, None] * head_dim + channel[None, None]
        used = (key >= start) & (key < end)
        if visible_ptr is None:
            used = used & ((key < prefix_end + last_end) | (key >= first))
        read = used[:, :, None]
        if head_dim != block_dim:
            read = read & of_head[None, None]
        k = tl.load(keys_ptr + at, mask=read, other=0.0)
        v = tl.load(values_ptr + at, mask=read, other=0.0)
        scores = tl.dot(q, tl.permute(k, (0, 2, 1)), input_precision="ieee") * scale
        if visible_ptr is None:
            told = (key >= first)[:, None] & ((key - first)[:, None] <= slot[None, :, None])
            if end_ptr is not None:
                of_ends = (key >= prefix_end) & (key < first)
                told |= of_ends[:, None] & ((key - prefix_end)[:, None] < shown[None, :, None])
        else:
            item = tl.where(key < first, places - first + key - prefix_end, key - first)
            known = inside[None, :, None] & ((key >= prefix_end) & (key < end) & (item < slots))[:, None]
            told = tl.load(visible_ptr[None] + item[:, None], mask=known, other=0) != 0
        if begin < prefix_end:
            of_prompt = (key >= start) & (key < prefix_end)
            told |= (tl.load(seen_ptr + key - prefix_end + prompt, mask=of_prompt, other=0) != 0)[:, None]
        scores = tl.where(told & (key < end)[:, None], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=2))
        # Rows that have seen nothing stay zero.
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(scores - safe[:, :, None])
        shrink = tl.exp(highest - safe)
        total = total * shrink + tl.sum(weights, axis=2)
        sums = tl.dot(weights.to(v.dtype), v, sums * shrink[:, :, None], input_precision="ieee")
        highest = higher
    higher = tl.max(highest, axis=0)
    shrink = tl.exp(highest - tl.where(higher == -float("inf"), 0.0, higher)[None])
    total = tl.sum(total * shrink, axis=0)
    sums = sum_of_parts(sums * shrink[:, :, None]) / tl.where(total > 0, total, 1.0)[:, None]
    out = out_ptr + (token[:, None] * heads + head) * head_dim + channel[None]
    tl.store(out, sums.to(out_ptr.dtype.element_ty), mask=inside[:, None] & of_head[None])


def stages(head_dim: int) -> int:
    return 4 if head_dim <= 64 else 3


def attention(
    query, keys, values, seen, prefix_end, first, slots, visible, table, positions, halves, ends, columns, gain, eps
):
    out = torch.empty(len(query), query.shape[1] * query.shape[2], dtype=query.dtype, device=query.device)
    yield out
    turns, gains = (table, positions, halves), (gain, None, None, None, eps)
    _launch(query, keys, values, seen, prefix_end, first, slots, visible, turns, ends, columns, None, gains, out)


def normed_attention(
    states,
    keys,
    values,
    seen,
    prefix_end,
    first,
    slots,
    index,
    table,
    positions,
    query_gain,
    key_gain,
    eps,
    query_bias,
    key_bias,
    visible,
    halves,
    ends,
    columns,
):
    heads = states.shape[1] - 2 * keys.shape[1]
    out = torch.empty(len(states), heads * states.shape[2], dtype=states.dtype, device=states.device)
    yield out
    turns, gains = (table, positions, halves), (query_gain, query_bias, key_gain, key_bias, eps)
    _launch(states, keys, values, seen, prefix_end, first, slots, visible, turns, ends, columns, index, gains, out)


def _launch(query, keys, values, seen, prefix_end, first, slots, visible, turns, ends, columns, index, gains, out):
    count, (rows, key_heads, places, head_dim) = len(query), keys.shape
    heads, (table, positions, halves), (*gains, eps) = out.shape[1] // head_dim, turns, gains
    queries, prompt, told = count // rows, seen.shape[1], 0 if visible is None else visible.shape[1]
    visible = None if visible is None else visible.view(torch.uint8)
    tensors = query, keys, values, seen.view(torch.uint8), slots, ends, visible, table, positions, index, *gains, out
    rotated, length = (1, 0) if table is None else (len(positions), len(table))
    sizes = len(slots), rotated, queries, places, prompt, prefix_end, first, told, length, columns
    heads_of = {"stride": query.stride(0), "heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    heads_of["block_dim"] = triton.next_power_of_2(head_dim)
    heads_of |= {"turned": head_dim if table is None else 2 * table.shape[1], "halves": halves}
    strides = (0 if each is None or each.ndim == 1 else head_dim for each in gains[::2])
    heads_of |= dict(zip(("query_gain_stride", "key_gain_stride"), strides, strict=True))
    blocks = {"block_prompt": triton.next_power_of_2(max(prompt, 1)), "block_queries": QUERIES, "block_keys": KEYS}
    options = {"parts": WARPS, "stages": stages(head_dim), "num_warps": WARPS, **blocks}
    given = (each is not None for each in (gains[2], table, visible))
    options |= tuned("attention", (heads, key_heads, head_dim, *given), count, query.device)
    grid = rows * key_heads, triton.cdiv(queries * heads // key_heads, QUERIES)
    attention_kernel[grid](*tensors, *sizes, head_dim**-0.5, eps, **heads_of, **options)
