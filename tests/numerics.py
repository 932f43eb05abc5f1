"""How far results may differ that differ in rounding alone."""

import torch


def rounding(terms: int, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """The largest plausible difference of results about `size` large, each from sums of `terms` numbers in all: each
    processor adds them in its own order, and the roundings add up like a random walk, here of four deviations."""
    return 4 * size * terms**0.5 * torch.finfo(dtype).eps
