"""Attention in Triton: a program takes a row, a head of the keys, and some queries."""

import torch
import triton
import triton.language as tl

from ..modulated.triton import moments
from ..programs import WARPS, log_gain_of, sum_of_parts, tuned, turned_heads


# Of a warp, at a time.
KEYS = 16
# Of channels of the states that queries are made of, at a time.
WIDTH = 64
# Per program: as many as a tile of tensor cores has rows. More would spill registers.
QUERIES = 16


_COUNTS = ["count", "rotated", "queries", "prompt", "prefix_end", "first", "slots", "positions", "columns"]


@triton.jit
def _position(position_ptr, at, inside, positions):
    """The row of a table, which has so many, of the token `at`; by default its own."""
    if position_ptr is not None:
        at = tl.load(position_ptr + at, mask=inside, other=0)
        at = tl.where(at < 0, positions - 1, at)
    return at


@triton.jit
def _product(
    x_ptr,
    inside,
    weight_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    eps,
    width: tl.constexpr,
    block_width: tl.constexpr,
    stages: tl.constexpr,
):
    """The product [N, M] in float32 of the LayerNorms of the rows at `x_ptr` [N, 1] and the weights at `weight_ptr`
    [M, 1]."""
    mean, variance = moments(x_ptr, inside, width, block_width, stages)
    factor = 1 / tl.sqrt_rn(variance + eps)
    sums = tl.full([inside.shape[0], weight_ptr.shape[0]], 0.0, tl.float32)
    for start in tl.range(0, width, block_width, num_stages=stages):
        at = start + tl.arange(0, block_width)
        x = tl.load(x_ptr + at[None], mask=inside[:, None], other=0.0).to(tl.float32)
        x = (x - mean[:, None]) * factor[:, None] * tl.load(norm_weight_ptr + at).to(tl.float32)[None]
        x += tl.load(norm_bias_ptr + at).to(tl.float32)[None]
        weight = tl.load(weight_ptr + at[None])
        sums = tl.dot(x.to(weight.dtype), tl.trans(weight), sums, input_precision="ieee")
    return sums


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
    log_gain_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
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
    row_stride,
    head_stride,
    scale,
    length,
    eps,
    stride: tl.constexpr,
    place_stride: tl.constexpr,
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
    block_width: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
):
    writes: tl.constexpr = key_gain_ptr is not None or log_gain_ptr is not None
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
    if weight_ptr is not None:
        x = query_ptr + token[:, None] * stride
        weight_ptr += (key_head * head_dim + tl.where(of_head, channel, 0))[:, None].to(tl.int64) * stride
        q = _product(x, inside, weight_ptr, norm_weight_ptr, norm_bias_ptr, eps, stride, block_width, stages)
        bias = tl.load(bias_ptr + key_head * head_dim + channel, mask=of_head, other=0.0)
        q = tl.where(of_head[None], q + bias.to(tl.float32)[None], 0.0).to(keys_ptr.dtype.element_ty)
    elif query_gain_ptr is None and log_gain_ptr is None and table_ptr is None:
        q = tl.load(states + channel[None], mask=inside[:, None] & of_head[None], other=0.0)
    else:
        position = tl.full([block_queries, 1], 0, tl.int64)
        if table_ptr is not None:
            position = _position(position_ptr, row * queries % rotated + query, inside, positions)[:, None]
        gain, bias = query_gain_ptr, query_bias_ptr
        if query_gain_stride:
            gain += head * query_gain_stride
        if query_bias_ptr is not None:
            bias += head * query_gain_stride
        normed: tl.constexpr = query_gain_ptr is not None or log_gain_ptr is not None
        own = inside[:, None]
        q = turned_heads(
            states, own, gain, bias, eps, table_ptr, position, head_dim, block_dim, normed, turned, halves
        )
        if log_gain_ptr is not None:
            q *= log_gain_of(log_gain_ptr + head, own) * length
        q = q.to(query_ptr.dtype.element_ty)
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + given, mask=inside, other=0).to(tl.int32)
    else:
        slot = tl.full([block_queries], 0, tl.int32) + slots - 1
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
    base = row.to(tl.int64) * row_stride + key_head * head_stride
    keys_ptr += base
    values_ptr += base
    if writes:
        # Every program writes all keys and values of this step that it reads: it can wait for its own writes only.
        # Programs of other queries write the same numbers to the same slots, so their order does not matter.
        gain, bias = key_gain_ptr, key_bias_ptr
        if key_gain_ptr is not None:
            gain += key_head * key_gain_stride
        if key_bias_ptr is not None:
            bias += key_head * key_gain_stride
        for begin in tl.range(0, queries, block_queries):
            new = (begin + tl.arange(0, block_queries))[:, None]
            fed = new < queries
            position = tl.full([block_queries, 1], 0, tl.int64)
            if table_ptr is not None:
                position = _position(position_ptr, row * queries % rotated + new, fed, positions)
            states = query_ptr + (row * queries + new) * stride + (heads + key_head) * head_dim
            k = turned_heads(
                states, fed, gain, bias, eps, table_ptr, position, head_dim, block_dim, True, turned, halves
            )
            if log_gain_ptr is not None:
                k *= length
            if index_ptr is not None:
                place = tl.load(index_ptr + row * queries % count + new, mask=fed, other=0)
            else:
                place = first + slots - queries + new
            states += key_heads * head_dim
            v = tl.load(states + channel[None], mask=fed & of_head[None], other=0.0)
            at = place * place_stride + channel[None]
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
        at = key[:, :, None] * place_stride + channel[None, None]
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
    places = {"slot": slots, "visible": visible, "end": ends, "columns": columns}
    turns = {"table": table, "position": positions, "halves": halves, "query_gain": gain, "eps": eps}
    _launch(query, keys, values, seen, prefix_end, first, out, **places, **turns)


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
    places = {"slot": slots, "index": index, "visible": visible, "end": ends, "columns": columns}
    turns = {"table": table, "position": positions, "halves": halves}
    norms = {
        "query_gain": query_gain,
        "query_bias": query_bias,
        "key_gain": key_gain,
        "key_bias": key_bias,
        "eps": eps,
    }
    _launch(states, keys, values, seen, prefix_end, first, out, **places, **turns, **norms)


def unit_attention(states, log_scale, length, scale, keys, values, seen, first, stop, table):
    head_dim = keys.shape[3]
    out = torch.empty(len(states), keys.shape[1] * head_dim, dtype=states.dtype, device=states.device)
    yield out
    # The norm of a head makes it as long as the root of its width. As `F.normalize`, whose least norm is 1e-12.
    norms = {"log_gain": log_scale, "length": length / head_dim**0.5, "eps": 1e-24 / head_dim}
    table = None if table is None else table.flatten(0, 1)
    _launch(states, keys, values, seen, first, first, out, stop - first, table=table, scale=scale, **norms)


def text_attention(x, weight, bias, eps, norm_weight, norm_bias, keys, values, seen):
    out = torch.empty(len(x), len(weight), dtype=weight.dtype, device=x.device)
    yield out
    product = {"weight": weight, "bias": bias, "norm_weight": norm_weight, "norm_bias": norm_bias, "eps": eps}
    end = keys.shape[2]
    _launch(x[:, None], keys, values, seen, end, end, out, **product)


POINTERS = ("slot", "end", "visible", "table", "position", "index", "query_gain", "query_bias", "key_gain", "key_bias")
POINTERS += ("log_gain", "weight", "bias", "norm_weight", "norm_bias")


def _launch(
    query, keys, values, seen, prefix_end, first, out, sees=0, *, halves=False, columns=1, scale=None, length=1.0,
    eps=0.0, **given
):  # fmt: skip
    """The tensors `given` are named as in the kernel. Without slots, queries see the first `sees`, the last of which
    are their own."""
    count, (rows, key_heads, places, head_dim) = len(query), keys.shape
    heads, queries, prompt = out.shape[1] // head_dim, count // rows, seen.shape[1]
    tensors = {name: given.get(name) for name in POINTERS}
    slots, visible, table, positions = (tensors[name] for name in ("slot", "visible", "table", "position"))
    if visible is not None:
        sees, tensors["visible"] = visible.shape[1], visible.view(torch.uint8)
    rotated, turns = (1, 0) if table is None else (len(table if positions is None else positions), len(table))
    sizes = 1 if slots is None else len(slots), rotated, queries, places, prompt, prefix_end, first, sees, turns
    heads_of = {"stride": query.stride(0), "place_stride": keys.stride(2), "heads": heads, "key_heads": key_heads}
    heads_of |= {"head_dim": head_dim, "block_dim": triton.next_power_of_2(head_dim), "halves": halves}
    heads_of |= {"turned": head_dim if table is None else 2 * table.shape[1]}
    for name in ("query_gain", "key_gain"):
        gain = tensors[name]
        heads_of[f"{name}_stride"] = 0 if gain is None or gain.ndim == 1 else head_dim
    blocks = {"block_prompt": triton.next_power_of_2(max(prompt, 1)), "block_queries": QUERIES, "block_keys": KEYS}
    blocks |= {"block_width": WIDTH, "parts": WARPS, "stages": stages(head_dim), "num_warps": WARPS}
    known = (tensors[name] is not None for name in ("key_gain", "table", "visible", "log_gain", "weight"))
    blocks |= tuned("attention", (heads, key_heads, head_dim, *known), count, query.device)
    grid = rows * key_heads, triton.cdiv(queries * heads // key_heads, QUERIES)
    numbers = columns, *keys.stride()[:2], head_dim**-0.5 if scale is None else scale, length, eps
    attention_kernel[grid](
        query, keys, values, seen.view(torch.uint8), *tensors.values(), out, *sizes, *numbers, **heads_of, **blocks
    )
