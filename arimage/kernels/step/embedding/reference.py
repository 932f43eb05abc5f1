"""The reference of the start of a step in torch."""

import torch


def embedding(
    tokens: torch.LongTensor,
    positions: torch.LongTensor,
    slots: torch.LongTensor | None,
    places: torch.LongTensor,
    weight: torch.Tensor,
    branches: int,
) -> tuple[torch.Tensor, torch.LongTensor, torch.LongTensor]:
    hidden = weight[tokens.clamp(min=0)].masked_fill((tokens < 0)[..., None], 0).flatten(0, 1)
    own = (positions if slots is None else torch.where(positions < 0, -1, slots)).flatten()
    return hidden.repeat(branches, 1), own.clamp(min=0), places[own]
