"""Precision, recall, density and coverage of images, from their neighbours among the references."""

from collections.abc import Iterator

import numpy as np
import torch

from .standard_errors import Estimate, Prompts, mean_estimate


def neighbourhoods(
    features: np.ndarray,
    reference: np.ndarray,
    *,
    prompts: Prompts | None = None,
    k: int = 3,
    density_k: int = 5,
    block: int = 512,
) -> dict[str, Estimate]:
    """Fidelity and diversity, from balls around every image that reach to its k-th nearest neighbour in its own set.

    Precision is the share of images in the ball of a reference, recall the share of references in the ball of an image
    (https://arxiv.org/abs/1904.06991). Density is the number of balls of references that an image lies in, divided by
    k, and coverage the share of references with an image in their ball (https://arxiv.org/abs/2002.09797). All of them
    change with the number of images and references. The standard errors are those of means over the prompts; recall
    and coverage have none.

    Args:
        features: [N, D] of the images.
        reference: [M, D] of the reference.
        prompts: the prompt [N] of each image; by default each has its own.
        k: for precision and recall.
        density_k: k for density and coverage.
        block: how many rows of the matrix of distances are computed at a time.

    Raises:
        ValueError: if there are too few images or references for k neighbours.
    """
    fewest, most = min(len(features), len(reference)), max(k, density_k)
    if fewest <= most:
        raise ValueError(
            f"{fewest} images are too few for {most} neighbours each: give at least {most + 1} images and references"
        )
    # Centred, because float32 is most precise near 0.
    centre = reference.mean(0)
    images, references = torch.from_numpy(features - centre), torch.from_numpy(reference - centre)
    (image_radii,) = _radii(images, [k], block)
    radii, density_radii = _radii(references, [k, density_k], block)
    precise, dense = [], []
    recalled = torch.zeros(len(references), dtype=torch.bool)
    covered = torch.zeros(len(references), dtype=torch.bool)
    for rows, distances in _squared_distances(images, references, block):
        precise.append((distances <= radii).any(1))
        recalled |= (distances <= image_radii[rows, None]).any(0)
        near = distances <= density_radii
        dense.append(near.sum(1) / density_k)
        covered |= near.any(0)
    return {
        "precision": mean_estimate(torch.cat(precise).numpy(), prompts),
        "recall": Estimate(float(recalled.double().mean())),
        "density": mean_estimate(torch.cat(dense).numpy(), prompts),
        "coverage": Estimate(float(covered.double().mean())),
    }


def _squared_distances(points: torch.Tensor, others: torch.Tensor, block: int) -> Iterator[tuple[slice, torch.Tensor]]:
    # `torch.cdist` would copy `others` for every block.
    lengths, other_lengths = points.square().sum(1, keepdim=True), others.square().sum(1)
    for start in range(0, len(points), block):
        rows = slice(start, start + block)
        products = torch.addmm(other_lengths, points[rows], others.T, alpha=-2)
        yield rows, products.add_(lengths[rows]).clamp_(min=0)


def _radii(points: torch.Tensor, ks: list[int], block: int) -> list[torch.Tensor]:
    """Squared distances [N] of every point to its k-th nearest other, for each k."""
    # The nearest point is the point itself.
    found = [distances.topk(max(ks) + 1, largest=False) for _, distances in _squared_distances(points, points, block)]
    nearest = torch.cat([each.values for each in found])
    return [nearest[:, k] for k in ks]
