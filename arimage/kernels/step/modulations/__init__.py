"""The linear layers of a step that share their input."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ...operation import operation


@operation()
def modulations(x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> torch.Tensor:
    """The products of `x` [R, D] and all `weights` [N, D] with their `biases` [N], in one launch, next to each other:
    [R, sum of N]. Float32 is multiplied in full precision.

    Args:
        x: at most `MOST_ROWS` rows, D a multiple of 64.
        weights, biases: of layers that have as many rows each; the last one may have fewer.
    """
    return torch.cat([F.linear(x, *layer) for layer in zip(weights, biases, strict=True)], dim=1)
