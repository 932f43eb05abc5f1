"""The modulated linear layer in Triton: a program takes a few rows of the weight, and all tokens."""

import torch
import triton
import triton.language as tl

from ..programs import TILE_ROWS, WARPS, block_rows, gelu_of, tuned
from . import product_dtype


DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# Asynchronous copies of the tokens take shared memory.
SHARED = 96 << 10
# Fewer would be summed in another order.
LEAST_ROWS = 16


@triton.jit
def moments(x_ptr, inside, width: tl.constexpr, block_width: tl.constexpr, stages: tl.constexpr):
    """The means and the mean squared distances to them, [rows]."""
    # Chan, Golub and LeVeque: no difference of large sums.
    mean = tl.full(inside.shape, 0.0, tl.float32)
    squares = tl.full(inside.shape, 0.0, tl.float32)
    for start in tl.range(0, width, block_width, num_stages=stages):
        at = start + tl.arange(0, block_width)
        x = tl.load(x_ptr + at[None], mask=inside[:, None], other=0.0).to(tl.float32)
        part = tl.sum(x, axis=1) / block_width
        distance = x - part[:, None]
        further = part - mean
        share = block_width / (start + block_width)
        mean += further * share
        squares += tl.sum(distance * distance, axis=1) + further * further * start * share
    return mean, squares / width


@triton.jit(do_not_specialize=["rows", "tokens", "shared"])
def modulated_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    scale_ptr,
    shift_ptr,
    residual_ptr,
    gate_ptr,
    row_scale_ptr,
    out_ptr,
    rows,
    size,
    tokens,
    shared,
    scale_stride,
    shift_stride,
    gate_stride,
    eps,
    added,
    width: tl.constexpr,
    norm: tl.constexpr,
    activation: tl.constexpr,
    dtype: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_width: tl.constexpr,
    stages: tl.constexpr,
):
    out = tl.program_id(1) * block_out + tl.arange(0, block_out)
    token = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = token < rows
    row = token // tokens
    x_ptr += token[:, None] * width
    if norm:
        mean, variance = moments(x_ptr, inside, width, block_width, stages)
        factor = 1 / tl.sqrt_rn(variance + eps)
    # Rows after the last one repeat the first, and are not stored.
    weight = weight_ptr + tl.where(out < size, out, 0)[:, None].to(tl.int64) * width
    sums = tl.full([block_out, block_rows], 0.0, tl.float32)
    for start in tl.range(0, width, block_width, num_stages=stages):
        at = start + tl.arange(0, block_width)
        x = tl.load(x_ptr + at[None], mask=inside[:, None], other=0.0)
        if norm:
            x = (x.to(tl.float32) - mean[:, None]) * factor[:, None]
            if norm_weight_ptr is not None:
                x = x * tl.load(norm_weight_ptr + at).to(tl.float32)[None]
                x += tl.load(norm_bias_ptr + at).to(tl.float32)[None]
            if scale_ptr is not None:
                by = scale_ptr + row[:, None] * scale_stride + at[None]
                x = x * (tl.load(by, mask=inside[:, None], other=0.0).to(tl.float32) + added)
                by = shift_ptr + row[:, None] * shift_stride + at[None]
                x += tl.load(by, mask=inside[:, None], other=0.0).to(tl.float32)
        sums = tl.dot(tl.load(weight + at[None]).to(dtype), tl.trans(x.to(dtype)), sums, input_precision="ieee")
    if row_scale_ptr is not None:
        sums *= tl.load(row_scale_ptr + out, mask=out < size, other=0.0)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + out, mask=out < size, other=0.0).to(tl.float32)[:, None]
    place = token[None] * size + out[:, None]
    visible = inside[None] & (out < size)[:, None]
    if residual_ptr is not None:
        # The product is rounded before the sum, as in torch.
        sums = sums.to(dtype).to(tl.float32)
        if gate_ptr is not None:
            gate = gate_ptr + row[None] * gate_stride + out[:, None]
            sums = sums * tl.load(gate, mask=visible, other=0.0).to(tl.float32)
        before = residual_ptr + (token // shared)[None] * size + out[:, None]
        sums += tl.load(before, mask=visible, other=0.0).to(tl.float32)
    if activation == "silu":
        sums = sums / (1 + tl.exp(-sums))
    if activation == "gelu":
        sums = gelu_of(sums)
    if activation == "gelu_tanh":
        inner = 1.5957691216057308 * (sums + 0.044715 * sums * sums * sums)
        sums = sums / (1 + tl.exp(-inner))
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=visible)


def block_out(size: int) -> int:
    """How many rows of a weight a program takes: as many for any number of tokens, so that no sum depends on it. More
    than 32 would take other instructions."""
    return 32 if size >= 8192 else 16


def tiles(rows: int, width: int, size: int, x: torch.dtype, weight: torch.dtype, loads: int = 1) -> dict[str, int]:
    """The blocks of a program, which loads as many numbers for a token. Those that a sum depends on do not follow from
    the number of rows."""
    block = 32 if weight.itemsize == 4 else 64 if x.itemsize == 4 or width % 128 else 128
    # Of 64 rows with their conditions, weights in float32 would spill registers.
    most = 32 if loads > 1 and weight.itemsize == 4 else TILE_ROWS
    count = min(max(block_rows(rows), LEAST_ROWS), most)
    each = block * (loads * count * x.itemsize + block_out(size) * weight.itemsize)
    return {
        "block_rows": count,
        "block_out": block_out(size),
        "block_width": block,
        "stages": max(2, min(4, SHARED // each)),
    }


def modulated(
    x, weight, bias, eps, norm_weight, norm_bias, scale, shift, added, residual, gate, activation, precise, row_scale
):
    (rows, width), size = x.shape, len(weight)
    product = product_dtype(weight, bias, precise, row_scale)
    out = torch.empty(rows, size, dtype=product if residual is None else residual.dtype, device=x.device)
    yield out
    condition = scale if gate is None else gate
    residual = None if residual is None else residual.contiguous()
    tensors = x.contiguous(), weight, bias, norm_weight, norm_bias, scale, shift, residual, gate, row_scale, out
    tokens, shared = (rows if each is None else rows // len(each) for each in (condition, residual))
    strides = (0 if each is None else each.stride(0) for each in (scale, shift, gate))
    blocks = tiles(rows, width, size, x.dtype, product, 1 if scale is None else 3)
    options = {"width": width, "norm": eps is not None, "activation": activation, "dtype": DTYPES[product]}
    options |= {**blocks, "num_warps": WARPS}
    given = (each is not None for each in (eps, norm_weight, scale))
    options |= tuned("modulated", (size, width, *given, x.dtype, product, weight.dtype), rows, x.device)
    grid = triton.cdiv(rows, options["block_rows"]), triton.cdiv(size, options["block_out"])
    eps = 0.0 if eps is None else eps
    modulated_kernel[grid](*tensors, rows, size, tokens, shared, *strides, eps, added, **options)
