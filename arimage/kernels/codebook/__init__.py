"""From vectors to codes and back: the nearest row of a codebook, and grids of rows."""

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

    The lowest id of several equally near. Among unit vectors it is the code of the greatest cosine.
    """
    return _operations(latents).nearest_code(latents, codebook)


def fold(codebook: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The table [V, C] of what a 1x1 convolution, `weight` [C, D, 1, 1] and `bias` [C], makes of each row of `codebook`."""
    return codebook @ weight.flatten(1).T + bias


def lookup(codes: torch.LongTensor, table: torch.Tensor) -> torch.Tensor:
    """Codes [B, h, w] to the rows of `table` [V, C] that they name, as an image [B, C, h, w], contiguous. No gradients."""
    return _operations(codes).lookup(codes, table)
