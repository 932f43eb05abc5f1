"""A window of drafts in Triton: one program per image, or per slot where whole distributions move."""

import torch
import triton
import triton.language as tl

from ..cursor.triton import count_step
from ..noise import key_of
from ..noise.triton import place_of, uniform_of


@triton.jit
def open_window_kernel(
    positions_ptr,
    tokens_ptr,
    at_ptr,
    ended_ptr,
    drafts_ptr,
    previous_ptr,
    fed_ptr,
    positions_stride,
    tokens_stride,
    window,
    block,
    size,
    padded: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, padded)
    inside = slot < window
    positions = tl.load(positions_ptr + image * positions_stride + slot, mask=inside, other=block)
    tokens_ptr += image * tokens_stride
    drafts = tl.load(tokens_ptr + positions, mask=inside, other=0)
    previous = tl.load(tokens_ptr + positions - block, mask=inside, other=0)
    ended = positions >= size
    out = image * window + slot
    tl.store(at_ptr + out, positions, mask=inside)
    tl.store(ended_ptr + out, ended.to(tl.uint8), mask=inside)
    tl.store(drafts_ptr + out, drafts, mask=inside)
    tl.store(previous_ptr + out, previous, mask=inside)
    tl.store(fed_ptr + out, tl.where(ended, -1, positions - block), mask=inside)


@triton.jit
def close_window_kernel(
    positions_ptr,
    kept_ptr,
    verified_ptr,
    redrafted_ptr,
    tokens_ptr,
    cursor_ptr,
    finished_ptr,
    steps_ptr,
    accepted_ptr,
    end_ptr,
    tokens_stride,
    accepted_stride,
    window,
    block,
    size,
    padded: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, padded)
    inside = slot < window
    place = image * window + slot
    positions = tl.load(positions_ptr + place, mask=inside, other=0)
    kept = tl.load(kept_ptr + place, mask=inside, other=1) != 0
    last = tl.load(cursor_ptr + image) + window - 1
    end = tl.minimum(tl.min(tl.where(kept, last, positions)) + 1, size)
    end = (end + block - 1) // block * block
    written = tl.load(verified_ptr + place, mask=inside, other=0)
    if redrafted_ptr is not None:
        written = tl.where(positions < end, written, tl.load(redrafted_ptr + place, mask=inside, other=0))
    tl.store(tokens_ptr + image * tokens_stride + positions, written, mask=inside)
    tl.store(end_ptr + image, end)
    count_step(image, end, cursor_ptr, finished_ptr, steps_ptr, accepted_ptr, accepted_stride, size)


@triton.jit
def _first_above(sums_ptr, number, count, bits: tl.constexpr):
    """How many of the `count` sums in order are at most `number`; `count` < 2 ** `bits`."""
    low = tl.full([], 0, tl.int64)
    high = low + count
    for _ in range(bits):
        middle = (low + high) // 2
        below = tl.load(sums_ptr + middle, mask=low < high, other=float("inf")) <= number
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def slide_window_kernel(
    positions_ptr,
    fresh_ptr,
    tokens_ptr,
    q_ptr,
    p_ptr,
    end_ptr,
    start_ptr,
    start_sums_ptr,
    forced_ptr,
    neighbour_ptr,
    jumps,
    context_ptr,
    last_ptr,
    uniform_ptr,
    seeds_ptr,
    steps_ptr,
    key,
    uniform_strides,
    tokens_stride,
    slots,
    window,
    vocab_size,
    size,
    given,
    bits: tl.constexpr,
    block: tl.constexpr,
):
    """`slots`: how many there are, of which the first `window` are in use. `given`: the tokens of the context."""
    image = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1)
    place = image * slots + slot
    position = tl.load(positions_ptr + place)
    entered = position < tl.load(end_ptr + image)
    # All threads have read the position before it changes.
    tl.debug_barrier()
    tl.store(fresh_ptr + place, entered.to(tl.uint8))
    q_ptr += place * vocab_size
    if entered:
        position += window
        tl.store(positions_ptr + place, position)
        # The token whose distribution is one-hot.
        known = tl.full([], -1, tl.int64)
        if neighbour_ptr is not None:
            last = tl.load(last_ptr + image)
            neighbour_ptr += image * (size + 1)
            rank = tl.load(neighbour_ptr + tl.minimum(position, size))
            for _ in range(jumps):
                rank = tl.where(rank > last, tl.load(neighbour_ptr + rank), rank)
            # No slot drafts a position up to `last`.
            known = tl.load(tokens_ptr + image * tokens_stride + tl.minimum(rank, last))
            if context_ptr is not None:
                if rank == size:
                    known = tl.load(context_ptr + image * given + position % given)
            token = known
        else:
            if uniform_ptr is not None:
                number = tl.load(uniform_ptr + image * uniform_strides[0] + slot * uniform_strides[1])
            else:
                number, _ = uniform_of(place_of(seeds_ptr, steps_ptr, image, position, key))
            token = _first_above(start_sums_ptr + image * vocab_size, number, vocab_size, bits)
        if forced_ptr is not None:
            forced = tl.load(forced_ptr + image * size + tl.minimum(position, size - 1))
            known = tl.where(forced < 0, known, forced)
            token = tl.where(forced < 0, token, forced)
        tl.store(tokens_ptr + image * tokens_stride + position, token)
        for begin in range(0, vocab_size, block):
            index = begin + tl.arange(0, block)
            weights = tl.load(start_ptr + image * vocab_size + index, mask=index < vocab_size, other=0.0)
            weights = tl.where(known < 0, weights, (index == known).to(tl.float32))
            tl.store(q_ptr + index, weights, mask=index < vocab_size)
    elif p_ptr is not None:
        p_ptr += (image * window + slot) * vocab_size
        for begin in range(0, vocab_size, block):
            index = begin + tl.arange(0, block)
            tl.store(q_ptr + index, tl.load(p_ptr + index, mask=index < vocab_size), mask=index < vocab_size)


def open_window(positions, tokens, window, block, size):
    at, drafts, previous, fed = (positions.new_empty(len(positions), window) for _ in range(4))
    ended = torch.empty_like(at, dtype=torch.bool)
    yield at, ended, drafts, previous, fed
    slots = positions, tokens, at, ended.view(torch.uint8), drafts, previous, fed
    sizes = positions.stride(0), tokens.stride(0), window, block, size
    open_window_kernel[(len(positions),)](*slots, *sizes, padded=triton.next_power_of_2(window), num_warps=1)


def close_window(positions, kept, verified, redrafted, tokens, cursor, finished, steps, accepted, block, size):
    end, window = torch.empty_like(cursor), positions.shape[1]
    yield end
    drafts = positions, kept.view(torch.uint8), verified, redrafted
    state = tokens, cursor, finished.view(torch.uint8), steps, accepted, end
    sizes = tokens.stride(0), accepted.stride(0), window, block, size
    # One warp, since the program writes what it has read.
    options = {"padded": triton.next_power_of_2(window), "num_warps": 1}
    close_window_kernel[(len(positions),)](*drafts, *state, *sizes, **options)


def slide_window(positions, fresh, tokens, q, p, end, *rest):
    yield
    start, start_sums, forced, neighbour, jumps, context, last, uniform, seeds, steps, purpose, window, size = rest
    images, slots, vocab_size = q.shape
    state = positions, fresh.view(torch.uint8), tokens, q, p, end
    drafting = start, start_sums, forced, neighbour, jumps, context, last
    numbers = uniform, seeds, steps, key_of(purpose), (0, 0) if uniform is None else uniform.stride()
    sizes = tokens.stride(0), slots, window, vocab_size, size, 0 if context is None else context.shape[1]
    options = {"bits": vocab_size.bit_length(), "block": min(4096, triton.next_power_of_2(vocab_size))}
    slide_window_kernel[(images, window)](*state, *drafting, *numbers, *sizes, **options, num_warps=8)
