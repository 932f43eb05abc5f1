"""Standard errors by the jackknife, and bootstrap intervals of means."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A figure with its standard error and 95 % interval, if they are known."""

    value: float
    standard_error: float | None = None
    interval: tuple[float, float] | None = None


def jackknife_standard_error(
    statistic: Callable[[np.ndarray], float], rows: np.ndarray, *, blocks: int = 20, seed: int = 0
) -> float:
    """Standard error of `statistic(rows)` by the jackknife, which leaves out each of `blocks` random blocks in turn.

    For stratified rows (equally many images of every class) it is an upper bound.
    """
    order = np.random.default_rng(seed).permutation(len(rows))
    left_out = np.array_split(order, min(blocks, len(rows)))
    values = np.array([statistic(np.delete(rows, block, axis=0)) for block in left_out])
    return float(np.sqrt((len(values) - 1) * values.var()))


def mean_estimate(values: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """The mean of `values` [N] with its 95 % interval: percentiles of the means of `resamples` bootstrap samples."""
    values = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(len(values), size=len(values))].mean() for _ in range(resamples)]
    low, high = np.percentile(means, [2.5, 97.5])
    standard_error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return Estimate(float(values.mean()), standard_error, (float(low), float(high)))


def paired_difference(values: np.ndarray, baseline: np.ndarray, *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """`mean_estimate` of `values - baseline` [N], which are paired by prompt and seed.

    Raises:
        ValueError: if there are more of one than of the other.
    """
    if len(values) != len(baseline):
        raise ValueError(
            f"{len(values)} values cannot be paired with {len(baseline)}: score runs of the same manifest"
        )
    return mean_estimate(np.asarray(values) - np.asarray(baseline), resamples=resamples, seed=seed)
