"""The modulated norm in Triton: a program takes a row."""

import torch
import triton
import triton.language as tl
from torch import library


# With four, a row of 2048 float32 numbers spills.
WARPS = 8


@triton.jit(do_not_specialize=["tokens"])
def modulated_norm_kernel(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    tokens,
    scale_stride,
    shift_stride,
    eps,
    added,
    width: tl.constexpr,
    block: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = token // tokens
    at = tl.arange(0, block)
    inside = at < width
    x = tl.load(x_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x) / width
    x = tl.where(inside, x - mean, 0.0)
    x = x * (1 / tl.sqrt_rn(tl.sum(x * x) / width + eps))
    if norm_weight_ptr is not None:
        x = x * tl.load(norm_weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(norm_bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        x = x * (tl.load(scale_ptr + row * scale_stride + at, mask=inside, other=0.0).to(tl.float32) + added)
        x += tl.load(shift_ptr + row * shift_stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + at, x.to(out_ptr.dtype.element_ty), mask=inside)


@library.custom_op("arimage::step_modulated_norm", mutates_args=())
def _modulated_norm(
    x: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    added: float,
) -> torch.Tensor:
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=dtype, device=x.device)
    with torch.cuda.device_of(x):
        modulated_norm_kernel[(rows,)](
            x.contiguous(),
            norm_weight,
            norm_bias,
            scale,
            shift,
            out,
            1 if scale is None else rows // len(scale),
            0 if scale is None else scale.stride(0),
            0 if shift is None else shift.stride(0),
            eps,
            added,
            width=width,
            block=triton.next_power_of_2(width),
            num_warps=WARPS,
        )
    return out


@_modulated_norm.register_fake
def _(x, eps, dtype, norm_weight, norm_bias, scale, shift, added):
    return x.new_empty(x.shape, dtype=dtype)


modulated_norm = _modulated_norm
