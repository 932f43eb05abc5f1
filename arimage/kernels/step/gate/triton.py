"""The gate in Triton: a program takes a part of a row."""

import torch
import triton
import triton.language as tl
from torch import library

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


@library.custom_op("arimage::step_gate", mutates_args=())
def _gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    rows, size = gates.shape
    out = torch.empty(rows, size, dtype=gates.dtype, device=gates.device)
    with torch.cuda.device_of(gates):
        gate_kernel[(rows, triton.cdiv(size, BLOCK))](
            gates, ups, out, size, gates.stride(0), ups.stride(0), block=BLOCK, num_warps=WARPS
        )
    return out


@_gate.register_fake
def _(gates, ups):
    return gates.new_empty(gates.shape)


def gate(gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    return _gate(gates, ups)
