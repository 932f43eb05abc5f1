"""The gate in Triton: a program takes a part of a row."""

import torch
import triton
import triton.language as tl

from ..programs import WARPS


BLOCK = 1024


@triton.jit
def gate_kernel(gate_ptr, up_ptr, out_ptr, size, gate_stride, up_stride, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    inside = at < size
    gates = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    gated = gates / (1 + tl.exp(-gates)) * ups
    tl.store(out_ptr + row * size + at, gated.to(out_ptr.dtype.element_ty), mask=inside)


def gate(gates, ups):
    rows, size = gates.shape
    out = torch.empty(rows, size, dtype=gates.dtype, device=gates.device)
    yield out
    strides, grid = (gates.stride(0), ups.stride(0)), (rows, triton.cdiv(size, BLOCK))
    gate_kernel[grid](gates, ups, out, size, *strides, block=BLOCK, num_warps=WARPS)
