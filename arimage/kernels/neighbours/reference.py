"""The reference of the mass of a token's neighbours in torch."""

import torch


def neighbour_mass(
    p: torch.FloatTensor, x: torch.LongTensor, neighbours: torch.IntTensor, bound: torch.FloatTensor
) -> torch.FloatTensor:
    cumulative = p.gather(-1, neighbours[x].long()).cumsum(-1)
    within = (cumulative <= bound[..., None]).long().cumprod(-1)
    # Zero before the first neighbour.
    return torch.where(within > 0, cumulative, 0).amax(-1)
