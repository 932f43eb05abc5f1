"""The start of a model's step: embeddings, and where the cache keeps the fed tokens."""

import torch

from ...operation import operation


@operation(whole=("tokens", "positions", "slots"))
def embedding(
    tokens: torch.LongTensor,
    positions: torch.LongTensor,
    slots: torch.LongTensor | None,
    places: torch.LongTensor,
    weight: torch.Tensor,
    branches: int,
) -> tuple[torch.Tensor, torch.LongTensor, torch.LongTensor]:
    """The embeddings of tokens [B, Q] for all branches, [branches * B * Q, D]; up to which slot of the image each
    sees, [B * Q]; and its place in the cache, [B * Q].

    Args:
        tokens: -1 is a token that is not known yet, whose embedding is zero.
        positions, slots: [B, Q] each, see `TokenModel.forward`; padding is written nowhere, and sees slot 0.
        places: where each slot lies, nowhere last, see `SlottedCache.index_of`.
        weight: [V, D].
    """
    hidden = weight[tokens.clamp(min=0)].masked_fill((tokens < 0)[..., None], 0).flatten(0, 1)
    own = (positions if slots is None else torch.where(positions < 0, -1, slots)).flatten()
    return hidden.repeat(branches, 1), own.clamp(min=0), places[own]
