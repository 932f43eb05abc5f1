"""From vectors to codes, by the nearest row of a codebook."""

import torch


# Scores held at a time: 16 MiB in float32.
_SCORES = 1 << 22


def nearest_code(latents: torch.Tensor, codebook: torch.Tensor) -> torch.LongTensor:
    """The ids [M] of the rows of `codebook` [V, D] nearest to `latents` [M, D], by L2 distance in float32.

    Ties go to the lowest id. For unit vectors it is the code with the greatest cosine similarity.
    """
    codebook = codebook.float()
    # |l - c|^2 is smallest where l c - |c|^2 / 2 is largest.
    offset = codebook.square().sum(-1).mul(-0.5)
    chunks = latents.float().split(max(1, _SCORES // len(codebook)))
    return torch.cat([torch.addmm(offset, chunk, codebook.T).argmax(-1) for chunk in chunks])
