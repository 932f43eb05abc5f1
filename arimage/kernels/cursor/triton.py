"""The begin and the end of a step in Triton: one program per image."""

import torch
import triton
import triton.language as tl


@triton.jit
def open_step_kernel(
    cursor_ptr,
    finished_ptr,
    tokens_ptr,
    positions_ptr,
    previous_ptr,
    fed_ptr,
    tokens_stride,
    block,
    padded: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, padded)
    inside = index < block
    positions = tl.load(cursor_ptr + image) + index
    before = positions - block
    previous = tl.load(tokens_ptr + image * tokens_stride + before, mask=inside, other=0)
    finished = tl.load(finished_ptr + image) != 0
    out = image * block + index
    tl.store(positions_ptr + out, positions, mask=inside)
    tl.store(previous_ptr + out, previous, mask=inside)
    tl.store(fed_ptr + out, tl.where(finished, -1, before), mask=inside)


@triton.jit
def count_step(image, end, cursor_ptr, finished_ptr, steps_ptr, accepted_ptr, accepted_stride, size):
    """`advance` for one image."""
    step = tl.load(steps_ptr + image)
    finished = tl.load(finished_ptr + image)
    tl.store(accepted_ptr + step * accepted_stride + image, end - tl.load(cursor_ptr + image))
    tl.store(steps_ptr + image, tl.where(finished == 0, step + 1, step))
    tl.store(cursor_ptr + image, end)
    tl.store(finished_ptr + image, (end >= size).to(tl.uint8))


@triton.jit
def close_step_kernel(
    positions_ptr,
    sampled_ptr,
    tokens_ptr,
    cursor_ptr,
    finished_ptr,
    steps_ptr,
    accepted_ptr,
    tokens_stride,
    accepted_stride,
    block,
    size,
    padded: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, padded)
    inside = index < block
    positions = tl.load(positions_ptr + image * block + index, mask=inside, other=0)
    sampled = tl.load(sampled_ptr + image * block + index, mask=inside, other=0)
    tl.store(tokens_ptr + image * tokens_stride + positions, sampled, mask=inside)
    end = tl.minimum(tl.load(cursor_ptr + image) + block, size)
    count_step(image, end, cursor_ptr, finished_ptr, steps_ptr, accepted_ptr, accepted_stride, size)


@triton.jit
def advance_kernel(end_ptr, cursor_ptr, finished_ptr, steps_ptr, accepted_ptr, accepted_stride, size):
    image = tl.program_id(0).to(tl.int64)
    end = tl.load(end_ptr + image)
    count_step(image, end, cursor_ptr, finished_ptr, steps_ptr, accepted_ptr, accepted_stride, size)


def open_step(cursor, finished, tokens, block):
    positions, previous, fed = (cursor.new_empty(len(cursor), block) for _ in range(3))
    yield positions, previous, fed
    state = cursor, finished.view(torch.uint8), tokens, positions, previous, fed
    padded = triton.next_power_of_2(block)
    open_step_kernel[(len(cursor),)](*state, tokens.stride(0), block, padded=padded, num_warps=1)


def close_step(positions, sampled, tokens, cursor, finished, steps, accepted, size):
    yield
    block = positions.shape[1]
    state = positions, sampled, tokens, cursor, finished.view(torch.uint8), steps, accepted
    sizes = tokens.stride(0), accepted.stride(0), block, size
    close_step_kernel[(len(cursor),)](*state, *sizes, padded=triton.next_power_of_2(block), num_warps=1)


def advance(end, cursor, finished, steps, accepted, size):
    yield
    state = end, cursor, finished.view(torch.uint8), steps, accepted
    advance_kernel[(len(cursor),)](*state, accepted.stride(0), size, num_warps=1)
