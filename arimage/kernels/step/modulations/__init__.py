"""The linear layers of a step that share their input."""

from collections.abc import Sequence

import torch

from ...operation import operation
from ..linear import product


@operation()
def modulations(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
) -> torch.Tensor:
    """The products of `x` [R, D] and all `weights` [N, D] with their `biases` [N], in one launch, next to each other:
    [R, sum of N]. Float32 is multiplied in full precision.

    Args:
        x: at most `MOST_ROWS` rows, D a multiple of 64.
        weights, biases: of layers that have as many rows each; the last one may have fewer.
        scales: float32 [N], what the rows of weights of 8 bits are multiplied by; none of others.
    """
    layers = zip(weights, biases, scales or [None] * len(weights), strict=True)
    return torch.cat([product(x, weight, scale, bias) for weight, bias, scale in layers], dim=1)
