"""The linear layers of a step that share their input."""

from collections.abc import Sequence

import torch

from ... import runs_triton
from . import reference


def modulations(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The products of `x` [R, D] and all `weights` [N, D] with their `biases` [N], in one launch, next to each other:
    [R, sum of N]. Float32 is multiplied in full precision.

    Args:
        x: at most `MOST_ROWS` rows, D a multiple of 64.
        weights, biases: of layers that have as many rows each; the last one may have fewer.
    """
    if runs_triton(x):
        from .triton import modulations

        return modulations(x, list(weights), list(biases))
    return reference.modulations(x, weights, biases)
