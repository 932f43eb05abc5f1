"""The start of a model's step: embeddings, and where the cache keeps the fed tokens."""

import torch

from ... import runs_triton
from . import reference


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
        places: where each slot lies, nowhere last, see `RowCache.places`.
        weight: [V, D].
    """
    if runs_triton(weight):
        from .triton import embedding

        return embedding(tokens, positions, slots, places, weight, branches)
    return reference.embedding(tokens, positions, slots, places, weight, branches)
