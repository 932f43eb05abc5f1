"""What the kernels of a step share in Triton."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


# A dot product takes no fewer.
LEAST_ROWS = 16
WARPS = 4


@triton.jit
def prefetch(weight_ptr, rows, size, width: tl.constexpr, pdl: tl.constexpr):
    """Bring `rows` of a weight [size, width] into the L2 cache, one instruction per row."""
    if pdl:
        inside = rows < size
        item: tl.constexpr = weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        tl.inline_asm_elementwise(
            """{ .reg .pred p; setp.ne.b32 p, $2, 0;
            @p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0; }""",
            "=r,l,r,r",
            [
                (weight_ptr + tl.where(inside, rows, 0).to(tl.int64) * width).to(tl.int64),
                inside.to(tl.int32),
                tl.full(inside.shape, item * width, tl.int32),
            ],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait(pdl: tl.constexpr):
    """Wait for the kernel before, and let the next one start. Only weights may be touched earlier."""
    if pdl:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def norm_factor(squares, width: tl.constexpr, eps):
    return 1 / tl.sqrt_rn(squares / width + eps)


@triton.jit
def rotated(states, turns):
    """Rotate neighbouring pairs of channels of `states` [N, head_dim] by the cosines and sines `turns`, which lie like
    them."""
    half: tl.constexpr = states.shape[1] // 2
    even, odd = states.to(tl.float32).reshape(states.shape[0], half, 2).split()
    cos, sin = turns.reshape(turns.shape[0], half, 2).split()
    return tl.interleave(even * cos - odd * sin, odd * cos + even * sin).to(states.dtype)


def launch_options(device: torch.device) -> dict[str, Any]:
    """Arguments of a launch: `pdl`, and the options of Triton."""
    pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"pdl": pdl, "num_warps": WARPS} | ({"launch_pdl": True} if pdl else {})


def block_rows(rows: int) -> int:
    return max(triton.next_power_of_2(rows), LEAST_ROWS)


def block_width(width: int) -> int:
    """How many channels a product takes at a time, whatever the number of rows."""
    return 128 if width % 128 == 0 else 64
