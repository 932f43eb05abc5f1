"""The nearest neighbours of tokens and their probability mass, by which LANTERN relaxes its acceptance."""

import torch

from ..operation import operation


# Distances held at a time: 64 MiB in float32.
_DISTANCES = 1 << 24


def nearest_neighbours(codebook: torch.Tensor, count: int) -> torch.IntTensor:
    """The `count` nearest other entries of each entry of `codebook` [V, D], int32 [V, count], the nearest first.

    Distances are L2, in float32. Equally distant entries come in any order. Takes seconds for large codebooks.

    Raises:
        ValueError: if `count` is not in 1 .. V - 1.
    """
    size = len(codebook)
    if not 1 <= count < size:
        raise ValueError(f"count is {count}: a token of {size} has 1 to {size - 1} neighbours")
    codebook = codebook.detach().float()
    table = torch.empty(size, count, dtype=torch.int32, device=codebook.device)
    for entries in torch.arange(size, device=codebook.device).split(max(1, _DISTANCES // size)):
        # By differences: the matrix product loses the small distances, which matter here.
        distance = torch.cdist(codebook[entries], codebook, compute_mode="donot_use_mm_for_euclid_dist")
        distance.scatter_(1, entries[:, None], torch.inf)
        table[entries] = distance.topk(count, largest=False).indices.int()
    return table


@operation(whole=("p", "x", "neighbours", "bound"))
def neighbour_mass(
    p: torch.FloatTensor, x: torch.LongTensor, neighbours: torch.IntTensor, bound: torch.FloatTensor
) -> torch.FloatTensor:
    """The summed probability [B, W] of the longest prefix of each token's neighbours that does not exceed a bound.

    LANTERN (https://arxiv.org/abs/2410.03355) bounds it by a constant delta, LANTERN++
    (https://arxiv.org/abs/2502.06352) by (lambda - 1) p[x].

    Args:
        p: probabilities [B, W, V].
        x: tokens [B, W].
        neighbours: the table [V, K] of `nearest_neighbours`.
        bound: [B, W], float32.
    """
    cumulative = p.gather(-1, neighbours[x].long()).cumsum(-1)
    within = (cumulative <= bound[..., None]).long().cumprod(-1)
    # Zero before the first neighbour.
    return torch.where(within > 0, cumulative, 0).amax(-1)
