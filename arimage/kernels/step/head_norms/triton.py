"""Norms and rotations of heads in Triton: a program takes some heads of a token, or copies some of a place."""

import triton
import triton.language as tl

from ..programs import WARPS, log_gain_of, turned_heads


HEADS = 8


@triton.jit(do_not_specialize=["tokens", "rotated", "first", "copied", "places"])
def head_norms_kernel(
    states_ptr,
    query_gain_ptr,
    key_gain_ptr,
    log_gain_ptr,
    table_ptr,
    past_keys_ptr,
    past_values_ptr,
    query_ptr,
    keys_ptr,
    values_ptr,
    tokens,
    rotated,
    first,
    copied,
    places,
    row_stride,
    head_stride,
    length,
    eps,
    heads: tl.constexpr,
    key_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block_dim: tl.constexpr,
    block_heads: tl.constexpr,
):
    row, place = (tl.program_id(0) // (tokens + copied)).to(tl.int64), tl.program_id(0) % (tokens + copied)
    head = (tl.program_id(1) * block_heads + tl.arange(0, block_heads))[:, None]
    channel = tl.arange(0, block_dim)[None]
    of_head = channel < head_dim
    is_key = (head >= heads) & (head < heads + key_heads) & of_head
    is_value = (head >= heads + key_heads) & (head < heads + 2 * key_heads) & of_head
    key_head = (head - heads) % key_heads
    at = (row * key_heads + key_head) * places * head_dim + channel
    if past_keys_ptr is not None:
        if place < copied:
            past = row * row_stride + key_head * head_stride + place * head_dim + channel
            old = at + place * head_dim
            tl.store(keys_ptr + old, tl.load(past_keys_ptr + past, mask=is_key, other=0.0), mask=is_key)
            tl.store(values_ptr + old, tl.load(past_values_ptr + past, mask=is_value, other=0.0), mask=is_value)
    if place >= copied:
        token = row * tokens + place - copied
        new = at + (first + place - copied) * head_dim
        own = states_ptr + (token * (heads + 2 * key_heads) + head) * head_dim
        gain = None
        if query_gain_ptr is not None:
            gain = tl.where(head < heads, query_gain_ptr, key_gain_ptr)
        inside, turn = head < heads + key_heads, token % rotated
        states = turned_heads(
            own, inside, gain, None, eps, table_ptr, turn, head_dim, block_dim, True, head_dim, False
        )
        is_query = (head < heads) & of_head
        if log_gain_ptr is not None:
            states *= tl.where(head < heads, log_gain_of(log_gain_ptr + head, head < heads), 1.0) * length
        states = states.to(query_ptr.dtype.element_ty)
        tl.store(query_ptr + (token * heads + head) * head_dim + channel, states, mask=is_query)
        tl.store(keys_ptr + new, states, mask=is_key)
        tl.store(values_ptr + new, tl.load(own + channel, mask=is_value, other=0.0), mask=is_value)


def head_norms(states, query_gain, key_gain, eps, keys, values, first, table, past_keys, past_values):
    heads = states.shape[2] - 2 * keys.shape[1]
    query = states.new_empty(*states.shape[:2], heads, states.shape[3])
    yield query
    gains, past = (query_gain, key_gain, None), (past_keys, past_values)
    _launch(states, gains, table, past, query, keys, values, first, 0.0, eps)


def unit_heads(states, log_scale, length, keys, values, first, table):
    heads, head_dim = keys.shape[1], keys.shape[3]
    query = states.new_empty(*states.shape[:2], heads, head_dim)
    yield query
    # See `unit_attention`.
    length, eps = length / head_dim**0.5, 1e-24 / head_dim
    _launch(states, (None, None, log_scale), table, (None, None), query, keys, values, first, length, eps)


def _launch(states, gains, table, past, query, keys, values, first, length, eps):
    (rows, tokens, heads, head_dim), (_, key_heads, places, _) = query.shape, keys.shape
    copied, strides = (0, (0, 0)) if past[0] is None else (first, past[0].stride()[:2])
    tensors = states, *gains, table, *past, query, keys, values
    sizes = tokens, 1 if table is None else len(table) * tokens, first, copied, places, *strides, length, eps
    heads_of = {"heads": heads, "key_heads": key_heads, "head_dim": head_dim}
    blocks = {"block_dim": triton.next_power_of_2(head_dim), "block_heads": HEADS, "num_warps": WARPS}
    grid = rows * (tokens + copied), triton.cdiv(heads + 2 * key_heads, HEADS)
    head_norms_kernel[grid](*tensors, *sizes, **heads_of, **blocks)
