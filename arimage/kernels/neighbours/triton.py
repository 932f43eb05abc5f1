"""The mass of a token's neighbours in Triton: one program per token gathers and scans its row of neighbours."""

import torch
import triton
import triton.language as tl


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


def neighbour_mass(p, x, neighbours, bound):
    mass, count = torch.empty_like(bound), neighbours.shape[1]
    yield mass
    block = triton.next_power_of_2(count)
    neighbour_mass_kernel[(x.numel(),)](p, x, neighbours, bound, mass, p.shape[-1], count, block=block)
