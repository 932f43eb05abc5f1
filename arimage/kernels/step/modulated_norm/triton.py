"""The modulated norm in Triton: a program takes a row."""

import torch
import triton
import triton.language as tl


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


def modulated_norm(x, eps, dtype, norm_weight, norm_bias, scale, shift, added):
    (rows, width), device = x.shape, x.device
    out = torch.empty(rows, width, dtype=dtype, device=device)
    yield out
    tensors = x.contiguous(), norm_weight, norm_bias, scale, shift, out
    sizes = (1, 0, 0) if scale is None else (rows // len(scale), scale.stride(0), shift.stride(0))
    options = {"width": width, "block": triton.next_power_of_2(width), "num_warps": WARPS}
    modulated_norm_kernel[(rows,)](*tensors, *sizes, eps, added, **options)
