"""Fréchet distance of two sets of features (https://arxiv.org/abs/1706.08500), also for infinitely many images."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .standard_errors import Estimate, Prompts, jackknife_standard_error


def check_eigenvalues(name: str, values: np.ndarray) -> None:
    """Refuse a matrix that is no covariance by its eigenvalues [D]: float32 leaves no such negative ones."""
    rounding = np.finfo(np.float32).eps * len(values) ** 0.5
    if values.min() < -10 * rounding * np.abs(values).max():
        raise ValueError(
            f"{name} has the eigenvalue {values.min():.3g}, and a covariance has none below 0: compute the statistics "
            "again"
        )


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution with `mean` [D] and covariance `factor.T @ factor`, `factor` [R, D]; both are float64."""

    mean: np.ndarray
    factor: np.ndarray

    @classmethod
    def of_covariance(cls, mean: np.ndarray, covariance: np.ndarray) -> "Gaussian":
        """From a mean [D] and a covariance [D, D], as files of reference statistics hold them."""
        values, vectors = np.linalg.eigh(np.asarray(covariance, dtype=np.float64))
        check_eigenvalues("the covariance", values)
        return cls(np.asarray(mean, dtype=np.float64), np.sqrt(values.clip(min=0))[:, None] * vectors.T)

    @classmethod
    def of_features(cls, features: np.ndarray) -> "Gaussian":
        """From features [N, D]."""
        if len(features) < 2:
            raise ValueError(f"a Fréchet distance needs at least 2 images of reference, and there are {len(features)}")
        mean, centred = _centre(features)
        if len(centred) < centred.shape[1]:
            return cls(mean, centred / np.sqrt(len(centred) - 1))
        return cls.of_covariance(mean, centred.T @ centred / (len(centred) - 1))


def _centre(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    features = features.astype(np.float64)
    mean = features.mean(0)
    features -= mean
    return mean, features


class _Distances:
    """Squared Fréchet distances of parts of features [N, D] to a reference, from products that are computed once.

    A distance is |m - m'|^2 + tr S + tr S' - 2 tr (S S')^(1/2). With S = A^T A and S' = F^T F the last trace is the
    nuclear norm of A F^T: the sum of the roots of the eigenvalues of F S F^T, or of A S' A^T, which is smaller for few
    images."""

    def __init__(self, features: np.ndarray, reference: Gaussian):
        if features.shape[1] != len(reference.mean):
            raise ValueError(
                f"the reference has {len(reference.mean)} features and the images have {features.shape[1]}: "
                "use a reference of the same network"
            )
        mean, self._centred = _centre(features)
        self._factor, self._shift = reference.factor, mean - reference.mean
        self._projected = self._centred @ reference.factor.T
        self._squares = (self._centred**2).sum(1)
        self._traces = self._squares.sum(), (reference.factor**2).sum()

    @cached_property
    def _products(self) -> np.ndarray:
        return self._projected.T @ self._projected

    @cached_property
    def _products_of_images(self) -> np.ndarray:
        return self._projected @ self._projected.T

    def whole(self) -> float:
        """The distance of all images."""
        return self.without(np.arange(0))

    def without(self, left_out: np.ndarray) -> float:
        """The distance without the images [n] that are `left_out`."""
        count, others = len(self._centred) - len(left_out), self._projected[left_out]
        if count < 2:
            raise ValueError(f"a Fréchet distance needs at least 2 images, and there are {count}")
        # All images together have the mean 0.
        mean = -self._centred[left_out].sum(0) / count
        if count < len(self._factor):
            kept = np.delete(np.arange(len(self._centred)), left_out)
            product = self._products_of_images[np.ix_(kept, kept)]
            product = product - product.mean(0) - product.mean(1, keepdims=True) + product.mean()
        else:
            projected = self._factor @ mean
            product = self._products - others.T @ others - count * np.outer(projected, projected)
        roots = np.sqrt(np.linalg.eigvalsh(product / (count - 1)).clip(min=0))
        squares = self._traces[0] - self._squares[left_out].sum() - count * (mean**2).sum()
        return float(((self._shift + mean) ** 2).sum() + squares / (count - 1) + self._traces[1] - 2 * roots.sum())


def frechet_distance(features: np.ndarray, reference: Gaussian) -> float:
    """Squared Fréchet distance between the normal distribution of features [N, D] and a reference. With Inception
    features it is the FID.

    Raises:
        ValueError: if there are fewer than 2 images, or the reference has another number of features.
    """
    return _Distances(features, reference).whole()


def frechet_estimate(
    features: np.ndarray, reference: Gaussian, *, prompts: Prompts | None = None, blocks: int = 20
) -> Estimate:
    """`frechet_distance` with the standard error of a jackknife over `blocks` blocks of prompts, for a fixed
    reference. `prompts` [N] are those of the images; by default each has its own.

    The distance falls with the number of images: compare only figures of equally many images.

    Raises:
        ValueError: if there are fewer than 3 images, or the reference has another number of features.
    """
    if len(features) < 3:
        raise ValueError(f"a Fréchet distance with its standard error needs at least 3 images, not {len(features)}")
    distances = _Distances(features, reference)
    error = jackknife_standard_error(distances.without, len(features), prompts=prompts, blocks=blocks)
    return Estimate(distances.whole(), error)


def frechet_infinity(features: np.ndarray, reference: Gaussian, *, points: int = 15, seed: int = 0) -> float:
    """The limit of `frechet_distance` for infinitely many images (https://arxiv.org/abs/1911.07023).

    A line in 1 / N is fitted to the distances of `points` random subsets of half to all of the images; its value at 0
    is returned. Smaller subsets do not lie on a line unless they have many more images than features.
    """
    rng, distances = np.random.default_rng(seed), _Distances(features, reference)
    every, values = np.arange(len(features)), []
    sizes = np.linspace(max(2, len(features) // 2), len(features), points).astype(int)
    for size in sizes:
        values.append(distances.without(np.delete(every, rng.choice(len(features), size, replace=False))))
    return float(np.polyfit(1 / sizes, values, 1)[1])
