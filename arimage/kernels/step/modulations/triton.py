"""Linear layers that share their input in Triton: a program takes a few rows of one of the weights, and all tokens."""

import torch
import triton
import triton.language as tl

from ..modulated.triton import tiles
from ..programs import WARPS


@triton.jit(do_not_specialize=["rows"])
def modulations_kernel(
    x_ptr,
    weights,
    biases,
    scales,
    out_ptr,
    rows,
    size,
    whole_size,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_width: tl.constexpr,
    stages: tl.constexpr,
):
    blocks = tl.cdiv(size, block_out)
    layer = tl.program_id(1) // blocks
    weight_ptr, bias_ptr = weights[0], biases[0]
    for i in tl.static_range(1, len(weights)):
        weight_ptr = tl.where(layer == i, weights[i], weight_ptr)
        bias_ptr = tl.where(layer == i, biases[i], bias_ptr)
    if len(scales) > 0:
        scale_ptr = scales[0]
        for i in tl.static_range(1, len(scales)):
            scale_ptr = tl.where(layer == i, scales[i], scale_ptr)
    first = layer * size
    size = tl.minimum(size, whole_size - first)
    out = tl.program_id(1) % blocks * block_out + tl.arange(0, block_out)
    token = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    inside = token < rows
    x_ptr += token[:, None] * width
    # Rows after the last one repeat the first, and are not stored.
    weight_ptr += tl.where(out < size, out, 0)[:, None].to(tl.int64) * width
    sums = tl.full([block_out, block_rows], 0.0, tl.float32)
    for start in tl.range(0, width, block_width, num_stages=stages):
        at = start + tl.arange(0, block_width)
        turned = tl.trans(tl.load(x_ptr + at[None], mask=inside[:, None], other=0.0))
        sums = tl.dot(tl.load(weight_ptr + at[None]).to(turned.dtype), turned, sums, input_precision="ieee")
    if len(scales) > 0:
        sums *= tl.load(scale_ptr + out, mask=out < size, other=0.0)[:, None]
    sums += tl.load(bias_ptr + out, mask=out < size, other=0.0).to(tl.float32)[:, None]
    place = token[None] * whole_size + first + out[:, None]
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=inside[None] & (out < size)[:, None])


def modulations(x, weights, biases, scales):
    (rows, width), size, whole_size = x.shape, len(weights[0]), sum(map(len, weights))
    out = torch.empty(rows, whole_size, dtype=x.dtype, device=x.device)
    yield out
    blocks = tiles(rows, width, size, x.dtype, x.dtype)
    each, last = (triton.cdiv(n, blocks["block_out"]) for n in (size, len(weights[-1])))
    tensors, sizes = (x.contiguous(), tuple(weights), tuple(biases), tuple(scales), out), (rows, size, whole_size)
    grid = triton.cdiv(rows, blocks["block_rows"]), each * (len(weights) - 1) + last
    modulations_kernel[grid](*tensors, *sizes, width=width, **blocks, num_warps=WARPS)
