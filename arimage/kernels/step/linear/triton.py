"""The linear layer in Triton: a program takes a few rows of the weight, and all tokens."""

import torch
import triton
import triton.language as tl
from torch import library

from ..programs import block_rows, block_width, launch_options, norm_factor, prefetch, wait


STAGES = 4


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x_ptr,
    weight_ptr,
    gain_ptr,
    up_ptr,
    residual_ptr,
    scale_ptr,
    up_scale_ptr,
    out_ptr,
    rows,
    size,
    eps,
    width: tl.constexpr,
    block_rows: tl.constexpr,
    block_out: tl.constexpr,
    block_width: tl.constexpr,
    stages: tl.constexpr,
    pdl: tl.constexpr,
):
    out = tl.program_id(0) * block_out + tl.arange(0, block_out)
    prefetch(weight_ptr, out, size, width, pdl)
    if up_ptr is not None:
        prefetch(up_ptr, out, size, width, pdl)
    wait(pdl)
    token = tl.arange(0, block_rows)
    inside = token < rows
    x_ptr += token[:, None] * width
    # Rows after the last one repeat the first, and are not stored.
    row = tl.where(out < size, out, 0)[:, None].to(tl.int64) * width
    sums = tl.full([block_out, block_rows], 0.0, tl.float32)
    ups = tl.full([block_out, block_rows], 0.0, tl.float32)
    squares = tl.full([block_rows], 0.0, tl.float32)
    for start in tl.range(0, width, block_width, num_stages=stages):
        at = start + tl.arange(0, block_width)
        x = tl.load(x_ptr + at[None], mask=inside[:, None], other=0.0)
        if gain_ptr is not None:
            full = x.to(tl.float32)
            squares += tl.sum(full * full, axis=1)
            x = (full * tl.load(gain_ptr + at).to(tl.float32)[None]).to(x.dtype)
        turned = tl.trans(x)
        sums = tl.dot(tl.load(weight_ptr + row + at[None]).to(x.dtype), turned, sums, input_precision="ieee")
        if up_ptr is not None:
            ups = tl.dot(tl.load(up_ptr + row + at[None]).to(x.dtype), turned, ups, input_precision="ieee")
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + out, mask=out < size, other=0.0)[:, None]
        if up_ptr is not None:
            ups *= tl.load(up_scale_ptr + out, mask=out < size, other=0.0)[:, None]
    if gain_ptr is not None:
        factor = norm_factor(squares, width, eps)[None]
        sums *= factor
        ups *= factor
    if up_ptr is not None:
        sums = sums / (1 + tl.exp(-sums)) * ups
    place = token[None] * size + out[:, None]
    visible = inside[None] & (out < size)[:, None]
    if residual_ptr is not None:
        sums = sums.to(out_ptr.dtype.element_ty).to(tl.float32)
        sums += tl.load(residual_ptr + place, mask=visible, other=0.0).to(tl.float32)
    tl.store(out_ptr + place, sums.to(out_ptr.dtype.element_ty), mask=visible)


def block_out(size: int) -> int:
    """How many rows of a weight a program takes: as many for any number of tokens, so that no sum depends on it. More
    than 32 would take other instructions."""
    return 32 if size >= 8192 else 16


@library.custom_op("arimage::step_linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor | None,
    eps: float,
    up: torch.Tensor | None,
    residual: torch.Tensor | None,
    scale: torch.Tensor | None,
    up_scale: torch.Tensor | None,
) -> torch.Tensor:
    (rows, width), size = x.shape, len(weight)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    block = block_out(size)
    with torch.cuda.device_of(x):
        linear_kernel[(triton.cdiv(size, block),)](
            x,
            weight,
            gain,
            up,
            residual,
            scale,
            up_scale,
            out,
            rows,
            size,
            eps,
            width=width,
            block_rows=block_rows(rows),
            block_out=block,
            block_width=block_width(width),
            stages=STAGES,
            **launch_options(x.device),
        )
    return out


@_linear.register_fake
def _(x, weight, gain, eps, up, residual, scale, up_scale):
    return x.new_empty(len(x), len(weight))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    gain: torch.Tensor | None = None,
    eps: float = 0.0,
    up: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: torch.FloatTensor | None = None,
    up_scale: torch.FloatTensor | None = None,
) -> torch.Tensor:
    return _linear(x, weight, gain, eps, up, residual, scale, up_scale)
