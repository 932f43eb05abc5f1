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
    """For each of `latents` [M, D] the id [M] of the row of `codebook` [V, D] at the smallest L2 distance, in float32.

    Ties go to the lowest id. Among unit vectors it is the code of the greatest cosine.
    """
    return _operations(latents).nearest_code(latents, codebook)
