"""The definition of the mass of a token's neighbours, in torch."""

import torch


def neighbour_mass(
    p: torch.FloatTensor, x: torch.LongTensor, neighbours: torch.IntTensor, bound: torch.FloatTensor
) -> tuple[torch.FloatTensor, torch.LongTensor]:
    cumulative = p.gather(-1, neighbours[x].long()).cumsum(-1)
    taken = (cumulative <= bound[..., None]).long().cumprod(-1)
    # Zero before the first neighbour.
    mass = torch.where(taken > 0, cumulative, 0).amax(-1)
    return mass, taken.sum(-1)
