"""Fréchet distance of two sets of features (https://arxiv.org/abs/1706.08500), also for infinitely many images."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .standard_errors import Estimate, Prompts, check_width, standard_error


# The nodes of an integral over t: from e^-LOWEST to e^HIGHEST times the largest root, in steps of STEP in log t.
LOWEST, HIGHEST, STEP = 25.0, 16.0, 0.5
# Images that are rotated at a time.
ROWS = 4096


def check_eigenvalues(name: str, values: np.ndarray) -> None:
    """Refuse a matrix that is not a covariance: an eigenvalue of its [D] is further below 0 than float32 rounds."""
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


class FrechetDistance:
    """Squared Fréchet distances of features [N, D] of images, and of parts of them, to a reference.

    A distance is |m - m'|^2 + tr S + tr S' - 2 tr (S S')^(1/2). With S = A^T A and S' = F^T F the last trace is the
    nuclear norm of A F^T: the sum of the roots of the eigenvalues of F S F^T, or of A S' A^T, which is smaller for few
    images.

    Raises:
        ValueError: if there are fewer than 2 images, or the reference has another number of features.
    """

    def __init__(self, features: np.ndarray, reference: Gaussian):
        check_width(features, len(reference.mean))
        if len(features) < 2:
            raise ValueError(f"a Fréchet distance needs at least 2 images, and there are {len(features)}")
        mean, self._centred = _centre(features)
        self._shift = mean - reference.mean
        self._projected = self._centred @ reference.factor.T
        self._trace = (reference.factor**2).sum()

    def of(self, rows: np.ndarray | slice) -> float:
        """The distance of two or more of the images."""
        (mean, centred), (_, projected) = _centre(self._centred[rows]), _centre(self._projected[rows])
        roots = np.sqrt(np.linalg.eigvalsh(_product(projected)).clip(min=0))
        return self._distance(self._shift + mean, (centred**2).sum(), roots.sum(), len(centred))

    def _distance(self, shift: np.ndarray, squares: Any, roots: Any, count: int) -> Any:
        """From sums over `count` images: of squares, and of the roots of the eigenvalues of products."""
        distance = (shift**2).sum(-1) + squares / (count - 1) + self._trace - 2 * roots / (count - 1) ** 0.5
        return float(distance) if distance.ndim == 0 else distance

    @cached_property
    def _decomposed(self) -> tuple[np.ndarray, np.ndarray]:
        """The eigenvalues and eigenvectors of the products of all images."""
        values, vectors = np.linalg.eigh(_product(self._projected))
        return values.clip(min=0), vectors

    @cached_property
    def value(self) -> float:
        """The distance of all images."""
        return self._distance(
            self._shift, (self._centred**2).sum(), np.sqrt(self._decomposed[0]).sum(), len(self._centred)
        )

    def without_each(self) -> np.ndarray:
        """The distances [N] without one image each, from the one decomposition.

        Without an image, the matrix of products loses c v v^T. The sum of the roots of its eigenvalues l loses the
        integral over t > 0 of -log(1 - c sum_k (v_k^2 / (l_k + t^2))) / pi, since that of log(1 + l / t^2) is pi times
        the root of l.
        """
        values, vectors = self._decomposed
        count, width = self._projected.shape
        # Leaving out an image moves the mean of the others.
        share = count / (count - 1)
        # The integrand in log t falls off on both sides, so equal steps are accurate.
        nodes = np.exp(np.arange(-LOWEST, HIGHEST, STEP)) * (values.max() ** 0.5 or 1)
        weights = share / (values[:, None] + nodes**2)
        if count < width:
            gone = vectors**2 * values @ weights
        else:
            some = np.array_split(self._projected, -(-count // ROWS))
            gone = np.concatenate([(rows @ vectors) ** 2 @ weights for rows in some])
        lost = -np.log1p(-gone.clip(max=1 - np.finfo(float).epsneg)) @ nodes * STEP / np.pi
        squares = (self._centred**2).sum(1)
        return self._distance(
            self._shift - self._centred / (count - 1),
            squares.sum() - share * squares,
            np.sqrt(values).sum() - lost,
            count - 1,
        )

    def estimate(self, prompts: Prompts | None = None) -> Estimate:
        """The distance with the standard error of a jackknife, for a fixed reference: that of the mean of what each
        image adds, over other prompts. `prompts` [N] are those of the images; by default each has its own.

        The distance falls with the number of images: compare only figures of equally many images.

        Raises:
            ValueError: if there are fewer than 3 images.
        """
        count = len(self._centred)
        if count < 3:
            raise ValueError(f"a Fréchet distance with its standard error needs at least 3 images, not {count}")
        return Estimate(self.value, standard_error((count - 1) * (self.value - self.without_each()), prompts))

    def infinity(self, seed: int = 0) -> float:
        """The limit for infinitely many images (https://arxiv.org/abs/1911.07023): a line in 1 / N through the
        distance of all images and the mean of those of two random halves, at 0. Halves do not lie on a line with the
        whole unless they have many more images than features."""
        count = len(self._centred)
        half, order = max(2, count // 2), np.random.default_rng(seed).permutation(count)
        halves = (self.of(order[:half]) + self.of(order[-half:])) / 2
        return self.value - (halves - self.value) / count / (1 / half - 1 / count)


def _product(projected: np.ndarray) -> np.ndarray:
    """The smaller of P^T P and P P^T, which have the same eigenvalues but for zeros."""
    few = len(projected) < projected.shape[1]
    return projected @ projected.T if few else projected.T @ projected


def frechet_distance(features: np.ndarray, reference: Gaussian) -> float:
    """Squared Fréchet distance between the normal distribution of features [N, D] and a reference. With Inception
    features it is the FID.

    Raises:
        ValueError: if there are fewer than 2 images, or the reference has another number of features.
    """
    return FrechetDistance(features, reference).of(slice(None))
