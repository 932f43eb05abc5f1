"""Kernel distances of two sets of features: the KID with Inception features (https://arxiv.org/abs/1801.01401), and
the CMMD with those of CLIP (https://arxiv.org/abs/2401.09603)."""

from collections.abc import Iterator

import numpy as np

from .standard_errors import (
    Estimate,
    Prompts,
    check_width,
    clustered_variance,
    jackknife_blocks,
    jackknife_error,
)


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
    values, first, second = [], [], []
    for _ in range(subsets):
        x = features[rng.choice(len(features), size, replace=False)]
        y = reference[rng.choice(len(reference), size, replace=False)]
        within, across, of_reference = _kernel_of_others(x), kernel(x, y), _kernel_of_others(y)
        values.append(within.mean() - 2 * across.mean() + of_reference.mean())
        second.append(_interaction(within))
        # Means over a subset vary more than means over all rows: subtract that part.
        noise = second[-1] + _interaction(across) * (1 - size / len(reference))
        first.append((within.mean(1) - across.mean(1)).var(ddof=1) - noise / size)
    count = len(features)
    variance = 4 * max(np.mean(first), 0) / count + 2 * np.mean(second) / count**2
    if prompts is not None:
        if len(set(prompts)) == 1:
            return Estimate(float(np.mean(values)))
        # Subsets seldom hold several images of a prompt: all images against the last subset say how alike those are.
        likeness = kernel(features, x).mean(1) - kernel(features, y).mean(1)
        of_prompts, of_images = (clustered_variance(likeness, some)[0] for some in (prompts, None))
        variance *= max(1, of_prompts / of_images) if of_images else 1
    return Estimate(float(np.mean(values)), float(np.sqrt(variance + np.var(values) / subsets)))


def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(x . y / D + 1)^3 of all rows of [N, D] and [M, D], float64. Products are as precise as the features, which
    rounds less than a mean of thousands of them varies."""
    base = (x @ y.T).astype(np.float64) / x.shape[1] + 1
    # NumPy's power is many times slower.
    return base * base * base


def _kernel_of_others(x: np.ndarray) -> np.ndarray:
    """The kernel of `x` with itself, with the mean over the other rows on the diagonal."""
    values = kernel(x, x)
    np.fill_diagonal(values, (values.sum(1) - values.diagonal()) / (len(x) - 1))
    return values


def _interaction(values: np.ndarray) -> float:
    """The variance that remains after row and column means are subtracted."""
    return (values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()).var()


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
