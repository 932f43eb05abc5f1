"""How like the nearest training example an image is: whether a model copies what it was trained on."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from tqdm import tqdm

from .standard_errors import Estimate, Prompts, jackknife_blocks, jackknife_error, mean_estimate


# Images above these are given as shares; those above the last one are near copies.
THRESHOLDS = (0.85, 0.95)
# Two pictures of one colour are equal, and unlike all others.
TINY = 1e-3


class Examples(Protocol):
    """The images of a training set by their numbers, uint8 [B, 3, S, S], with their coverage."""

    def __len__(self) -> int: ...

    def read(self, images: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]: ...


def contrasts(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels [B, 3, S, S] from 0 to 255 less the mean colour of each image, float32 [B, D]: what it shows, whatever
    the paper."""
    values = pixels.float() / 255
    return (values - values.mean((2, 3), keepdim=True)).flatten(1)


def likeness(some: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """The Tanimoto coefficients [A, B] of rows [A, D] and [B, D], ab / (aa + bb - ab): 1 for equal rows, near 0 for
    unrelated ones. This is the Jaccard index, what both have as a share of what either has, for real numbers."""
    both = some @ others.T + TINY
    return both / (some.square().sum(1)[:, None] + others.square().sum(1) - both + 2 * TINY)


def nearest(
    pixels: np.ndarray, examples: Examples, *, device: str = "cpu", block: int = 1024
) -> tuple[np.ndarray, np.ndarray]:
    """How like each image [N, 3, S, S], uint8, its nearest example is, and the number of that: [N] each.

    The examples are read once, `block` at a time, so that memory does not grow with their number.
    """
    best = torch.full((len(pixels),), -torch.inf, device=device)
    index = torch.zeros(len(pixels), dtype=torch.long, device=device)
    with ThreadPoolExecutor() as pool, tqdm(total=len(examples), desc="nearest", unit="image", leave=False) as bar:
        for start in range(0, len(examples), block):
            numbers = range(start, min(start + block, len(examples)))
            read = torch.cat([found for found, _ in pool.map(lambda number: examples.read([number]), numbers)])
            others = contrasts(read.to(device))
            for rows in (slice(first, first + block) for first in range(0, len(pixels), block)):
                found, at = likeness(contrasts(torch.from_numpy(pixels[rows]).to(device)), others).max(1)
                nearer = found > best[rows]
                best[rows] = torch.where(nearer, found, best[rows])
                index[rows] = torch.where(nearer, start + at, index[rows])
            bar.update(len(numbers))
    return best.cpu().numpy(), index.cpu().numpy()


def nearest_estimates(values: np.ndarray, prompts: Prompts | None = None) -> dict[str, Estimate]:
    """The median of the likeness [N] to the nearest example, and the shares of images above each of `THRESHOLDS`. The
    standard error of the median is that of a jackknife over 20 blocks of prompts."""
    block, error = jackknife_blocks(len(values), prompts), None
    if block is not None:
        error = jackknife_error([float(np.median(values[block != one])) for one in range(block.max() + 1)])
    shares = {f"nearest-above-{least}": mean_estimate(values > least, prompts) for least in THRESHOLDS}
    return {"nearest": Estimate(float(np.median(values)), error), **shares}
