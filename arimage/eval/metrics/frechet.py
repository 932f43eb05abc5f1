"""Fréchet distance of two sets of features (https://arxiv.org/abs/1706.08500), also for infinitely many images."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from .standard_errors import Estimate, Prompts, check_width, standard_error


# The nodes of an integral over t: from e^-LOWEST to e^HIGHEST times the largest root, in steps of STEP in log t.
LOWEST, HIGHEST, STEP = 25.0, 16.0, 0.5
# Images that are rotated at a time.
ROWS = 4096
# Columns of a product that are computed at a time.
COLUMNS = 256
EPSILON = torch.finfo(torch.float64).eps


def check_eigenvalues(name: str, values: torch.DoubleTensor) -> None:
    """Refuse a matrix that is not a covariance: an eigenvalue of its [D] is further below 0 than float32 rounds."""
    rounding = torch.finfo(torch.float32).eps * len(values) ** 0.5
    if values.min() < -10 * rounding * values.abs().max():
        raise ValueError(
            f"{name} has the eigenvalue {values.min():.3g}, and a covariance has none below 0: compute the statistics "
            "again"
        )


def to_double(values: np.ndarray, device: str | torch.device) -> torch.DoubleTensor:
    """Numbers in float64 on a device, or on the CPU for Apple's GPUs, which have no float64."""
    moved = torch.from_numpy(values).to("cpu" if torch.device(device).type == "mps" else device)
    return moved.double()


@dataclass(frozen=True)
class Gaussian:
    """A normal distribution with `mean` [D] and covariance `factor.T @ factor`, `factor` [R, D]; both are float64, on
    the device that distances are computed on."""

    mean: torch.DoubleTensor
    factor: torch.DoubleTensor

    @classmethod
    def of_covariance(cls, mean: np.ndarray, covariance: np.ndarray, device: str = "cpu") -> "Gaussian":
        """From a mean [D] and a covariance [D, D], as files of reference statistics hold them."""
        return cls(to_double(mean, device), _factor(to_double(covariance, device)))

    @classmethod
    def of_features(cls, features: np.ndarray, device: str = "cpu") -> "Gaussian":
        """From features [N, D]."""
        if len(features) < 2:
            raise ValueError(f"a Fréchet distance needs at least 2 images of reference, and there are {len(features)}")
        mean, centred = _centre(to_double(features, device))
        if len(centred) < centred.shape[1]:
            return cls(mean, centred / (len(centred) - 1) ** 0.5)
        return cls(mean, _factor(_gram(centred) / (len(centred) - 1)))


def _factor(covariance: torch.DoubleTensor) -> torch.DoubleTensor:
    """F [D, D] with F^T F = `covariance`, of which the lower triangle is read."""
    lower, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        return lower.T
    # It is singular up to rounding, or not a covariance.
    values, vectors = torch.linalg.eigh(covariance)
    check_eigenvalues("the covariance", values)
    return values.clamp(min=0).sqrt()[:, None] * vectors.T


def _centre(features: torch.DoubleTensor) -> tuple[torch.DoubleTensor, torch.DoubleTensor]:
    mean = features.mean(0)
    return mean, features - mean


class FrechetDistance:
    """Squared Fréchet distances of features [N, D] of images, and of parts of them, to a reference.

    A distance is |m - m'|^2 + tr S + tr S' - 2 tr (S S')^(1/2). With S = A^T A and S' = F^T F the last trace is the
    nuclear norm of A F^T: the sum of the roots of the eigenvalues of F S F^T, or of A S' A^T, which is smaller for few
    images. They are computed on the device of the reference.

    Raises:
        ValueError: if there are fewer than 2 images, or the reference has another number of features.
    """

    def __init__(self, features: np.ndarray, reference: Gaussian):
        check_width(features, len(reference.mean))
        if len(features) < 2:
            raise ValueError(f"a Fréchet distance needs at least 2 images, and there are {len(features)}")
        mean, self._centred = _centre(to_double(features, reference.mean.device))
        self._shift = mean - reference.mean
        self._projected = self._centred @ reference.factor.T
        self._trace = reference.factor.square().sum()

    def of(self, rows: np.ndarray | slice) -> float:
        """The distance of two or more of the images."""
        (mean, centred), (_, projected) = _centre(self._centred[rows]), _centre(self._projected[rows])
        roots = torch.linalg.eigvalsh(_product(projected)).clamp(min=0).sqrt()
        return float(self._distance(self._shift + mean, centred.square().sum(), roots.sum(), len(centred)))

    def _distance(
        self, shift: torch.Tensor, squares: torch.Tensor, roots: torch.Tensor, count: int
    ) -> torch.DoubleTensor:
        """From sums over `count` images: of squares, and of the roots of the eigenvalues of products."""
        return shift.square().sum(-1) + squares / (count - 1) + self._trace - 2 * roots / (count - 1) ** 0.5

    @cached_property
    def _decomposed(self) -> tuple[torch.DoubleTensor, torch.DoubleTensor]:
        """The eigenvalues and eigenvectors of the products of all images."""
        values, vectors = torch.linalg.eigh(_product(self._projected))
        return values.clamp(min=0), vectors

    @cached_property
    def value(self) -> float:
        """The distance of all images."""
        roots = self._decomposed[0].sqrt().sum()
        return float(self._distance(self._shift, self._centred.square().sum(), roots, len(self._centred)))

    def without_each(self) -> torch.DoubleTensor:
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
        steps = torch.arange(-LOWEST, HIGHEST, STEP, dtype=torch.float64, device=values.device).exp()
        largest = values.max()
        nodes = steps * torch.where(largest > 0, largest.sqrt(), 1)
        if count < width:
            # One at least is 0, since the images are centred, and not what rounding makes of it.
            values = torch.where(values > count * EPSILON * largest, values, 0)
            parts = [vectors.square() * values]
        else:
            parts = ((rows @ vectors).square() for rows in self._projected.split(ROWS))
        weights = share / (values[:, None] + nodes.square())
        gone = torch.cat([part @ weights for part in parts])
        lost = -torch.log1p(-gone.clamp(max=1 - EPSILON / 2)) @ nodes * (STEP / math.pi)
        squares = self._centred.square().sum(1)
        return self._distance(
            self._shift - self._centred / (count - 1),
            squares.sum() - share * squares,
            values.sqrt().sum() - lost,
            count - 1,
        )

    @cached_property
    def _added(self) -> torch.DoubleTensor:
        """What each image [N] adds to the distance, N - 1 times."""
        count = len(self._centred)
        if count < 3:
            raise ValueError(f"a Fréchet distance with its standard error needs at least 3 images, not {count}")
        return (count - 1) * (self.value - self.without_each())

    def estimate(self, prompts: Prompts | None = None) -> Estimate:
        """The distance with the standard error of a jackknife, for a fixed reference: that of the mean of what each
        image adds, over other prompts. `prompts` [N] are those of the images; by default each has its own.

        The distance falls with the number of images: compare only figures of equally many images.

        Raises:
            ValueError: if there are fewer than 3 images.
        """
        return Estimate(self.value, standard_error(self._added.cpu().numpy(), prompts))

    def infinity(self) -> float:
        """The limit for infinitely many images, to which https://arxiv.org/abs/1911.07023 follows a line in 1 / N.
        Here it goes through the distance of all images and the mean of those without one image each: the jackknife's
        correction of a bias. The bias is of 1 / N only if there are many more images than features.

        Raises:
            ValueError: if there are fewer than 3 images.
        """
        return self.value + float(self._added.mean())


def _product(projected: torch.DoubleTensor) -> torch.DoubleTensor:
    """The smaller of P^T P and P P^T, which have the same eigenvalues but for zeros; see `_gram`."""
    return _gram(projected.T if len(projected) < projected.shape[1] else projected)


def _gram(rows: torch.DoubleTensor) -> torch.DoubleTensor:
    """The lower triangle of R^T R [D, D], all that decompositions read; what is above it means nothing."""
    found = rows.new_zeros(rows.shape[1], rows.shape[1])
    for first in range(0, len(found), COLUMNS):
        columns = slice(first, first + COLUMNS)
        found[first:, columns] = rows[:, first:].T @ rows[:, columns]
    return found


def frechet_distance(features: np.ndarray, reference: Gaussian) -> float:
    """Squared Fréchet distance between the normal distribution of features [N, D] and a reference. With Inception
    features it is the FID.

    Raises:
        ValueError: if there are fewer than 2 images, or the reference has another number of features.
    """
    return FrechetDistance(features, reference).of(slice(None))
