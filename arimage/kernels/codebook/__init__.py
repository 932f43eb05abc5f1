"""From vectors to codes, by the nearest row of a codebook."""

import torch

from .. import runs_triton
from . import reference


def _operations(tensor: torch.Tensor):
    if runs_triton(tensor):
        from . import triton

        return triton
    return reference


def nearest_code(latents: torch.Tensor, codebook: torch.Tensor) -> torch.LongTensor:
    """The ids [M] of the rows of `codebook` [V, D] nearest to `latents` [M, D], by L2 distance in float32.

    Ties go to the lowest id. For unit vectors it is the code with the greatest cosine similarity.
    """
    return _operations(latents).nearest_code(latents, codebook)
