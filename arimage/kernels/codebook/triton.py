"""Nearest codes in Triton, without holding the distances to all codes at once."""

import torch
import triton
import triton.language as tl
from torch import library


@triton.jit
def nearest_code_kernel(
    latents_ptr,
    codebook_ptr,
    out_ptr,
    rows,
    size,
    width,
    block_rows: tl.constexpr,
    block_codes: tl.constexpr,
    block_width: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    best = tl.full([block_rows], -float("inf"), tl.float32)
    nearest = tl.full([block_rows], 0, tl.int32)
    for start in range(0, size, block_codes):
        code = start + tl.arange(0, block_codes)
        scores = tl.full([block_rows, block_codes], 0.0, tl.float32)
        norms = tl.full([block_codes], 0.0, tl.float32)
        for offset in range(0, width, block_width):
            axis = offset + tl.arange(0, block_width)
            latents = tl.load(
                latents_ptr + row[:, None] * width + axis,
                mask=(row[:, None] < rows) & (axis < width),
                other=0.0,
            ).to(tl.float32)
            codes = tl.load(
                codebook_ptr + code[None, :].to(tl.int64) * width + axis[:, None],
                mask=(code[None, :] < size) & (axis[:, None] < width),
                other=0.0,
            ).to(tl.float32)
            scores += tl.dot(latents, codes, input_precision="ieee")
            norms += tl.sum(codes * codes, axis=0)
        # |l - c|^2 is smallest where l c - |c|^2 / 2 is largest.
        scores = tl.where(code < size, scores - norms / 2, -float("inf"))
        score, place = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
        nearest = tl.where(score > best, start + place, nearest)
        best = tl.maximum(best, score)
    tl.store(out_ptr + row, nearest.to(tl.int64), mask=row < rows)


@library.custom_op("arimage::nearest_code", mutates_args=())
def _nearest_code(latents: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    (rows, width), size = latents.shape, len(codebook)
    out = torch.empty_like(latents[:, 0], dtype=torch.long)
    with torch.cuda.device_of(latents):
        nearest_code_kernel[(triton.cdiv(rows, 16),)](
            latents,
            codebook,
            out,
            rows,
            size,
            width,
            # With 32 rows or 4 warps, registers spill on an A100 or an H100.
            block_rows=16,
            block_codes=128,
            block_width=16,
            num_warps=8,
        )
    return out


@_nearest_code.register_fake
def _(latents, codebook):
    return torch.empty_like(latents[:, 0], dtype=torch.long)


def nearest_code(latents: torch.Tensor, codebook: torch.Tensor) -> torch.LongTensor:
    return _nearest_code(latents.contiguous(), codebook.contiguous())
