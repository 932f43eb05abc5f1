"""Standard errors and 95 % intervals of figures. The sampling unit is the prompt: images of one prompt resemble each
other, so a run of few prompts says little about others, however many images it has of each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


# 95 % of a normal distribution lie within so many standard deviations.
Z = 1.959963984540054
# The prompt [N] of each image: a text, or a number that stands for it. Without them, each image has its own.
Prompts = Sequence[str] | np.ndarray


@dataclass(frozen=True)
class Estimate:
    """A figure with its standard error and 95 % interval, if they are known."""

    value: float
    standard_error: float | None = None
    interval: tuple[float, float] | None = None


def check_width(features: np.ndarray, width: int) -> None:
    """Refuse features [N, D] of another width than those of a reference."""
    if features.shape[1] != width:
        raise ValueError(
            f"the reference has {width} features and the images have {features.shape[1]}: use a reference of the same "
            "network"
        )


def decimals(width: float) -> int:
    """How many decimals show two digits of an error, or of the width of an interval."""
    return max(0, 1 - math.floor(math.log10(width)))


def estimate_text(value: float, standard_error: float | None, interval: Sequence[float] | None, sign: str = "") -> str:
    """A figure with its 95 % interval in brackets, or with ± its standard error if it has no interval. `sign` is "+"
    for differences. Runs that an earlier version scored may have intervals and errors of 0, which mean nothing."""
    low, high = interval or (0, 0)
    if high > low:
        form = f"{sign}.{decimals(high - low)}f"
        return f"{value:{form}} ({low:{form}} to {high:{form}})"
    if standard_error:
        digits = decimals(standard_error)
        return f"{value:{sign}.{digits}f} ± {standard_error:.{digits}f}"
    return f"{value:{sign}.4g}"


def clustered_variance(values: np.ndarray, prompts: Prompts | None = None) -> tuple[float, int]:
    """The variance of the mean of `values` [N] over other prompts, 0 for one prompt, and the number of prompts."""
    deviations = np.asarray(values, dtype=np.float64) - np.mean(values)
    if prompts is not None:
        _, index = np.unique(np.asarray(prompts), return_inverse=True)
        deviations = np.bincount(index, deviations)
    count = len(deviations)
    # Bessel's correction is that of the prompts.
    return float((deviations**2).sum() / len(values) ** 2 * count / max(count - 1, 1)), count


def standard_error(values: np.ndarray, prompts: Prompts | None = None) -> float | None:
    """The standard error of the mean of `values` [N] over other prompts. None if it cannot be known: from one prompt,
    or from prompts that do not differ."""
    error = clustered_variance(values, prompts)[0] ** 0.5
    return error if error > 1e-9 * np.abs(values).max() else None


def jackknife_blocks(
    count: int, prompts: Prompts | None = None, *, blocks: int = 20, seed: int = 0
) -> np.ndarray | None:
    """The block, 0 to at most `blocks` - 1, of each of `count` rows: random blocks of equally many prompts. None for
    one prompt, which leaves nothing to compare."""
    _, index = np.unique(np.arange(count) if prompts is None else np.asarray(prompts), return_inverse=True)
    number = index.max() + 1
    if number == 1:
        return None
    block = np.empty(number, int)
    for one, chosen in enumerate(np.array_split(np.random.default_rng(seed).permutation(number), min(blocks, number))):
        block[chosen] = one
    return block[index]


def jackknife_error(values: Sequence[float]) -> float | None:
    """The standard error of a statistic from its `values` without each of the blocks, an upper bound for equally many
    images of every class. None if they do not differ."""
    return float(np.sqrt((len(values) - 1) * np.var(values))) or None


def mean_estimate(values: np.ndarray, prompts: Prompts | None = None) -> Estimate:
    """The mean of `values` [N] with its standard error and 95 % interval over other prompts.

    A share, of values that are all 0 or 1, has Wilson's interval for the number of independent images that vary as
    much (`_effective_count`), and half of its width over 1.96 as its standard error: four hits of four are "0.51 to
    1.00". Other values have Student's interval. One prompt has neither.
    """
    values = np.asarray(values, dtype=np.float64)
    mean, (variance, count) = float(values.mean()), clustered_variance(values, prompts)
    if count == 1:
        return Estimate(mean)
    if np.isin(values, (0, 1)).all():
        size = _effective_count(len(values), count, float(values.var()), variance)
        centre, scale = (mean + Z**2 / (2 * size)) / (1 + Z**2 / size), Z / (1 + Z**2 / size)
        return _between(mean, centre, scale * math.sqrt(mean * (1 - mean) / size + (Z / (2 * size)) ** 2), least=0)
    return _student(mean, standard_error(values, prompts), count)


def paired_difference(values: np.ndarray, baseline: np.ndarray, prompts: Prompts | None = None) -> Estimate:
    """The mean of `values - baseline` [N], which are paired by prompt and seed, with its standard error and 95 %
    interval over other prompts.

    If all of them are 0 or 1, the interval is that of Bonett and Price (https://doi.org/10.3102/1076998611411915) for
    as many independent pairs as vary as much, else Student's. One prompt has neither."""
    if len(values) != len(baseline):
        raise ValueError(
            f"{len(values)} values cannot be paired with {len(baseline)}: score runs of the same manifest"
        )
    values, baseline = (np.asarray(each, dtype=np.float64) for each in (values, baseline))
    differences = values - baseline
    mean, (variance, count) = float(differences.mean()), clustered_variance(differences, prompts)
    if count == 1:
        return Estimate(mean)
    if np.isin([values, baseline], (0, 1)).all():
        size = _effective_count(len(values), count, float(differences.var()), variance)
        better, worse = ((float((differences == one).mean()) * size + 1) / (size + 2) for one in (1, -1))
        half = Z * math.sqrt((better + worse - (better - worse) ** 2) / (size + 2))
        return _between(mean, better - worse, half, least=-1)
    return _student(mean, standard_error(differences, prompts), count)


def paired_ratio(values: np.ndarray, baseline: np.ndarray, prompts: Prompts | None = None) -> Estimate:
    """The mean of `values` [N] as a share of that of `baseline` [N], which are paired by prompt and seed, with its
    standard error over other prompts, by linearisation."""
    mean = float(np.mean(baseline))
    ratio = float(np.mean(values)) / mean
    return Estimate(ratio, standard_error((values - ratio * baseline) / mean, prompts))


def _effective_count(images: int, prompts: int, spread: float, variance: float) -> float:
    """How many independent images would leave a mean as uncertain as `images` images of `prompts` prompts do, whose
    values have the variance `spread` and their mean `variance` (Korn and Graubard, Survey Methodology 24, 1998).
    Images that are all alike count once per prompt."""
    from scipy.stats import t

    if spread == 0:
        return prompts
    # Without Bessel's correction: N images of N prompts are N.
    variance *= (prompts - 1) / prompts
    size = images if variance * images <= spread else spread / variance
    # Few prompts do not tell well how alike their images are.
    return size * float(t.ppf(0.975, images - 1) / t.ppf(0.975, prompts - 1)) ** 2


def _between(mean: float, centre: float, half: float, least: float) -> Estimate:
    return Estimate(mean, half / Z, (max(min(mean, centre - half), least), min(max(mean, centre + half), 1.0)))


def _student(mean: float, error: float | None, count: int) -> Estimate:
    from scipy.stats import t

    if error is None:
        return Estimate(mean)
    half = float(t.ppf(0.975, count - 1)) * error
    return Estimate(mean, error, (mean - half, mean + half))
