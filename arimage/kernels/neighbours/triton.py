"""The mass of a token's neighbours in Triton: one program per token gathers and scans its row of neighbours."""

import torch
import triton
import triton.language as tl
from torch import library


@triton.jit
def neighbour_mass_kernel(p_ptr, x_ptr, neighbours_ptr, bound_ptr, mass_ptr, vocab_size, count, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, block)
    code = tl.load(x_ptr + place)
    row = tl.load(neighbours_ptr + code * count + rank, mask=rank < count, other=0)
    p = tl.load(p_ptr + place * vocab_size + row, mask=rank < count, other=0.0).to(tl.float32)
    cumulative = tl.cumsum(p)
    within = (cumulative <= tl.load(bound_ptr + place)) & (rank < count)
    # Parallel sums need not be monotone: the prefix ends at the first that exceeds the bound.
    length = tl.minimum(tl.min(tl.where(within, block, rank)), count)
    tl.store(mass_ptr + place, tl.sum(tl.where(rank == length - 1, cumulative, 0.0)))


@library.custom_op("arimage::neighbour_mass", mutates_args=())
def _neighbour_mass(p: torch.Tensor, x: torch.Tensor, neighbours: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    mass, count = torch.empty_like(bound), neighbours.shape[1]
    with torch.cuda.device_of(p):
        neighbour_mass_kernel[(x.numel(),)](
            p, x, neighbours, bound, mass, p.shape[-1], count, block=triton.next_power_of_2(count)
        )
    return mass


@_neighbour_mass.register_fake
def _(p, x, neighbours, bound):
    return torch.empty_like(bound)


def neighbour_mass(
    p: torch.FloatTensor, x: torch.LongTensor, neighbours: torch.IntTensor, bound: torch.FloatTensor
) -> torch.FloatTensor:
    return _neighbour_mass(p.contiguous(), x.contiguous(), neighbours.contiguous(), bound.contiguous())
