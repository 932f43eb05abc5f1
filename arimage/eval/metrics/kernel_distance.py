"""Kernel distances of two sets of features: the KID with Inception features (https://arxiv.org/abs/1801.01401), and
the CMMD with those of CLIP (https://arxiv.org/abs/2401.09603)."""

from collections.abc import Iterator, Sequence

import numpy as np

from .standard_errors import (
    Estimate,
    Prompts,
    check_width,
    clustered_variance,
    jackknife_blocks,
    jackknife_error,
)


# Rows of a kernel that are computed at a time.
ROWS = 512


def subsets_of(count: int, others: int, subsets: int, subset_size: int) -> tuple[int, int]:
    """How many subsets `kernel_distance` takes of `count` images and `others` of the reference, and how large they
    are: all rows if there are fewer, and one subset if that is all of both."""
    size = min(subset_size, count, others)
    return 1 if size == count == others else subsets, size


def kernel_distance(
    features: np.ndarray,
    reference: np.ndarray,
    *,
    prompts: Prompts | None = None,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Unbiased squared maximum mean discrepancy under the kernel (x . y / D + 1)^3, averaged over random subsets.

    Its expectation does not depend on the number of images. The standard error is that of images of other prompts
    against the same reference: both terms of the variance of a U-statistic, and the spread over the choice of subsets.
    One prompt has none.

    Args:
        features: [N, D] of the images.
        reference: [M, D] of the reference.
        prompts: the prompt [N] of each image; by default each has its own.
        subset_size: rows of each subset, or all if there are fewer.

    Raises:
        ValueError: if either has fewer than 2 rows, or they differ in D.
    """
    subsets, size = subsets_of(len(features), len(reference), subsets, subset_size)
    if size < 2:
        raise ValueError(
            f"a kernel distance needs at least 2 images, and there are {len(features)} and {len(reference)}"
        )
    check_width(features, reference.shape[1])
    rng = np.random.default_rng(seed)
    chosen = [[rng.choice(len(rows), size, replace=False) for rows in (features, reference)] for _ in range(subsets)]
    # Where subsets overlap much, one kernel of all rows takes less time than one for each of them.
    together = subsets if max(len(features), len(reference)) ** 2 <= subsets * size**2 else 1
    groups = [chosen[begin : begin + together] for begin in range(0, subsets, together)]
    terms = [_subset_distances(features, reference, group) for group in groups]
    values, first, second = np.concatenate(terms, axis=1)
    count = len(features)
    variance = 4 * max(first.mean(), 0) / count + 2 * second.mean() / count**2
    if prompts is not None:
        if len(set(prompts)) == 1:
            return Estimate(float(values.mean()))
        # Subsets seldom hold several images of a prompt: all images against the last subset say how alike those are.
        x, y = features[chosen[-1][0]], reference[chosen[-1][1]]
        parts = np.array_split(features, len(features) // ROWS + 1)
        likeness = np.concatenate([kernel(part, x).mean(1) - kernel(part, y).mean(1) for part in parts])
        of_prompts, of_images = (clustered_variance(likeness, some)[0] for some in (prompts, None))
        variance *= max(1, of_prompts / of_images) if of_images else 1
    return Estimate(float(values.mean()), float(np.sqrt(variance + values.var() / subsets)))


def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(x . y / D + 1)^3 of all rows of [N, D] and [M, D], float64. Products have the precision of the features: their
    rounding is far below the noise of a mean over thousands of them."""
    base = (x @ y.T).astype(np.float64) / x.shape[1] + 1
    # NumPy's power is many times slower.
    return base * base * base


def _subset_distances(features: np.ndarray, reference: np.ndarray, chosen: list[list[np.ndarray]]) -> np.ndarray:
    """The distances of S subsets, and both terms of the variance of a U-statistic [3, S]. `chosen` are the rows of
    each subset: of the features, and as many of the reference."""
    size, mine, theirs = len(chosen[0][0]), *zip(*chosen, strict=True)
    (x, of_x), (y, of_y) = _members(features, mine), _members(reference, theirs)
    within, _, squares = _sums(x, x, of_x, of_x)
    within /= size - 1
    interaction = _interaction(within, within, squares + (within**2).sum(0), size)
    rows, columns, squares = _sums(x, y, of_x, of_y)
    rows, columns = rows / size, columns / size
    # Means over a subset vary more than means over all rows: subtract that part.
    noise = interaction + _interaction(rows, columns, squares, size) * (1 - size / len(reference))
    differences = within - rows
    spread = ((differences**2).sum(0) - differences.sum(0) ** 2 / size) / (size - 1)
    of_reference = _sums(y, y, of_y, of_y)[0].sum(0) / (size * (size - 1))
    values = within.sum(0) / size - 2 * rows.sum(0) / size + of_reference
    return np.stack([values, spread - noise / size, interaction])


def _members(points: np.ndarray, subsets: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The points [n, D] that are in a subset, and whether each is in each, 1 or 0 [n, S]."""
    rows = np.unique(np.concatenate(subsets))
    return points[rows], np.stack([np.isin(rows, subset) for subset in subsets], axis=1).astype(np.float64)


def _sums(
    x: np.ndarray, y: np.ndarray, of_x: np.ndarray, of_y: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums of the kernel within each subset: of every row of `x` [n, S] and of `y` [m, S], 0 where it is not in the
    subset, and of the squares [S]. A row and itself count 0."""
    rows, columns, squares = np.zeros_like(of_x), np.zeros_like(of_y), np.zeros(of_x.shape[1])
    for start in range(0, len(x), ROWS):
        part = slice(start, start + ROWS)
        # The other half of a symmetric kernel is known.
        later = slice(start if x is y else 0, None)
        values = kernel(x[part], y[later])
        if x is y:
            values = np.triu(values, 1)
        rows[part] += of_x[part] * (values @ of_y[later])
        columns[later] += of_y[later] * (values.T @ of_x[part])
        squares += (of_x[part] * (values**2 @ of_y[later])).sum(0)
    if x is y:
        rows += columns
        return rows, rows, 2 * squares
    return rows, columns, squares


def _interaction(rows: np.ndarray, columns: np.ndarray, squares: np.ndarray, size: int) -> np.ndarray:
    """The variances [S] of square matrices of `size` rows that remain after their row and column means are
    subtracted, from these means and the sums of squares."""
    means = rows.sum(0) / size
    return squares / size**2 - (rows**2).sum(0) / size - (columns**2).sum(0) / size + means**2


def gaussian_kernel_distance(
    features: np.ndarray,
    reference: np.ndarray,
    *,
    prompts: Prompts | None = None,
    sigma: float = 10,
    scale: float = 1000,
    rows: int = 512,
) -> Estimate:
    """`scale` times the squared maximum mean discrepancy under the Gaussian kernel exp(-|x - y|^2 / (2 sigma^2)).

    It is the biased estimator of the CMMD's authors, which includes the kernel of each row with itself: it is 0 for
    equal sets and never negative. The standard error is that of a jackknife over 20 blocks of prompts, for a fixed
    reference. One prompt has none.

    Args:
        features: [N, D] of the images; for the CMMD of unit length.
        reference: [M, D] of the reference.
        prompts: the prompt [N] of each image; by default each has its own.
        rows: how many rows of the matrix of kernels are computed at a time.

    Raises:
        ValueError: if the two differ in D.
    """
    check_width(features, reference.shape[1])
    x, y = features.astype(np.float64), reference.astype(np.float64)
    blocks = jackknife_blocks(len(x), prompts)
    block = np.zeros(len(x), int) if blocks is None else blocks
    # Sums over blocks are enough to leave each of them out.
    member = np.eye(block.max() + 1)[block]
    within, across = np.zeros((member.shape[1], member.shape[1])), np.zeros(member.shape[1])
    for part, values in _gaussian_kernels(x, x, sigma, rows):
        within += member[part].T @ (values @ member)
    for part, values in _gaussian_kernels(x, y, sigma, rows):
        across += member[part].T @ values.sum(1)
    of_reference = sum(values.sum() for _, values in _gaussian_kernels(y, y, sigma, rows)) / len(y) ** 2

    def distance(kept: np.ndarray) -> float:
        count = np.bincount(block)[kept].sum()
        mean = within[np.ix_(kept, kept)].sum() / count**2
        return float(scale * (mean - 2 * across[kept].sum() / (count * len(y)) + of_reference))

    every = np.arange(member.shape[1])
    error = None if blocks is None else jackknife_error([distance(np.delete(every, one)) for one in every])
    return Estimate(distance(every), error)


def _gaussian_kernels(x: np.ndarray, y: np.ndarray, sigma: float, rows: int) -> Iterator[tuple[slice, np.ndarray]]:
    lengths = (y**2).sum(1)
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        squares = (x[part] ** 2).sum(1)[:, None] + lengths - 2 * x[part] @ y.T
        yield part, np.exp(-squares / (2 * sigma**2))
