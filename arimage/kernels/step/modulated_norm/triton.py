"""The modulated norm in Triton: a program takes a row."""

import torch
import triton
import triton.language as tl


# With four, a row of 2048 float32 numbers spills.
WARPS = 8


@triton.jit(do_not_specialize=["tokens", "gated"])
def modulated_norm_kernel(
    x_ptr,
    residual_ptr,
    gate_ptr,
    sum_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    scale_ptr,
    shift_ptr,
    out_ptr,
    tokens,
    gated,
    scale_stride,
    shift_stride,
    gate_stride,
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
    if residual_ptr is not None:
        if gate_ptr is not None:
            gate = gate_ptr + token // gated * gate_stride + at
            x = x * tl.load(gate, mask=inside, other=0.0).to(tl.float32)
        x += tl.load(residual_ptr + token * width + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + token * width + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
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
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    yield out
    _launch(x.contiguous(), (None, None, None), out, eps, (norm_weight, norm_bias), (scale, shift), added)


def sum_and_norm(product, residual, gate, eps, norm_weight, norm_bias, scale, shift):
    states, out = torch.empty_like(residual), torch.empty_like(product)
    yield states, out
    _launch(product, (residual, gate, states), out, eps, (norm_weight, norm_bias), (scale, shift), 0.0)


def _launch(x, sums, out, eps, affine, modulation, added):
    (rows, width), (_, gate, _), (scale, shift) = x.shape, sums, modulation
    counts = (rows // len(each) if each is not None else 1 for each in (scale, gate))
    strides = (0 if each is None else each.stride(0) for each in (scale, shift, gate))
    options = {"width": width, "block": triton.next_power_of_2(width), "num_warps": WARPS}
    tensors = x, *sums, *affine, *modulation, out
    modulated_norm_kernel[(rows,)](*tensors, *counts, *strides, eps, added, **options)
