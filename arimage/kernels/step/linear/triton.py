"""The linear layer in Triton: a program takes a few rows of the weight, and all tokens."""

import torch
import triton
import triton.language as tl

from ..programs import (
    BLOCK_WIDTH,
    NORM_ROWS,
    WARPS,
    block_rows,
    channels_of_parts,
    gained,
    gelu_of,
    load_channels,
    norm_factor,
    sum_of_parts,
    tuned,
)


# Bytes for blocks, as most cards have.
SHARED = 96 << 10


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    gain_ptr,
    factor_ptr,
    up_ptr,
    residual_ptr,
    scale_ptr,
    up_scale_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    rows,
    size,
    eps,
    width: tl.constexpr,
    gelu: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_width: tl.constexpr,
    parts: tl.constexpr,
    stages: tl.constexpr,
):
    # Programs of the same rows of the weight run at the same time.
    out = tl.program_id(1) * block_out + tl.arange(0, block_out)
    token = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = token < rows
    place = token[None] * size + out[:, None]
    visible = inside[None] & (out < size)[:, None]
    # What is needed last is loaded first, while the weights are on their way.
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + token, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + place, mask=visible, other=0.0)
    # Of `weight` and, below it, of `up`: tensor cores take both at once.
    weights: tl.constexpr = 1 if up_ptr is None else 2
    item = tl.arange(0, weights * block_out)
    row = tl.program_id(1) * block_out + item % block_out
    # Rows after the last one repeat the first, and are not stored.
    row = tl.where(row < size, row, 0).to(tl.int64) * width
    if up_ptr is None:
        weight_ptr += row[None, :, None]
    else:
        # Compilers do not see that rows of both begin at multiples of 16 bytes.
        weight_ptr = tl.multiple_of(tl.where(item < block_out, weight_ptr, up_ptr) + row, 16)[None, :, None]
    taken = token if index_ptr is None else tl.load(index_ptr + token, mask=inside, other=0)
    x_ptr += (taken * width)[None, :, None]
    sums = tl.full([parts, weights * block_out, block_rows], 0.0, tl.float32)
    squares = tl.full([parts, block_rows, block_width // parts], 0.0, tl.float32)
    channel = channels_of_parts(block_width, parts)
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
    if gain_ptr is not None:
        factor = norm_factor(squares, width, eps)
    if gain_ptr is not None or factor_ptr is not None:
        sums *= factor[None]
    if up_ptr is not None:
        sums, ups = tl.permute(sums.reshape(2, block_out, block_rows), (1, 2, 0)).split()
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + out, mask=out < size, other=0.0)[:, None]
        if up_ptr is not None:
            ups *= tl.load(up_scale_ptr + out, mask=out < size, other=0.0)[:, None]
    if up_ptr is not None:
        sums = sums / (1 + tl.exp(-sums)) * ups
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < size, other=0.0).to(tl.float32)[:, None]
    if gelu:
        sums = gelu_of(sums)
    if residual_ptr is not None:
        sums = sums.to(out_ptr.dtype.element_ty).to(tl.float32) + residual.to(tl.float32)
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=visible)


def tile(rows: int, size: int, gated: bool) -> dict[str, int]:
    """How many rows of a weight, or of each of two, a program takes, and for how many blocks of channels it has room.
    No sum depends on them. These were the fastest of those tried on an H100."""
    if gated:
        block = 32 if rows <= 32 else 16
    elif size >= 8192:
        block = 64 if rows <= 16 else 32
    else:
        block = 16
    each = 2 * BLOCK_WIDTH * (block_rows(rows) + (1 + gated) * block)
    return {"block_out": block, "stages": min(1 + SHARED // each, 6)}


def linear(x, weight, gain, eps, up, residual, scale, up_scale, bias, gelu, index):
    rows, width, size = len(x if index is None else index), x.shape[1], len(weight)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    yield out
    options = {"block_rows": block_rows(rows), "block_width": BLOCK_WIDTH, "parts": WARPS, "num_warps": WARPS}
    shape, factor = (size, width, up is not None, gain is not None, weight.dtype), None
    options |= tile(rows, size, up is not None) | tuned("linear", shape, rows, x.device)
    if gain is not None and rows > NORM_ROWS:
        (x, factor), gain = gained(x, gain, eps, options["block_width"], options["parts"], index), None
        index = None
    tensors = x, weight, gain, factor, up, residual, scale, up_scale, bias, index, out
    grid = triton.cdiv(rows, options["block_rows"]), triton.cdiv(size, options["block_out"])
    linear_kernel[grid](*tensors, rows, size, eps, width=width, gelu=gelu, **options)
