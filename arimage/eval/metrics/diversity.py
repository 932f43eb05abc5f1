"""How much images of one prompt differ, next to how much images of different prompts do."""

import numpy as np

from .standard_errors import Estimate, jackknife_blocks, jackknife_error


# Pixels of all images that are sorted at a time.
COLUMNS = 1024


def sum_of_distances(pixels: np.ndarray) -> float:
    """The sum over all pairs of images, [N, D] from 0 to 255, of the mean absolute difference of their pixels, 0 to
    1."""
    # In ascending order, each value is added once for every smaller one and subtracted once for every larger one.
    signs = 2.0 * np.arange(len(pixels)) - (len(pixels) - 1)
    parts = (np.sort(pixels[:, start : start + COLUMNS], 0) for start in range(0, pixels.shape[1], COLUMNS))
    return float(sum((signs @ part).sum() for part in parts)) / (255 * pixels.shape[1])


def diversity(pixels: np.ndarray, prompts: np.ndarray) -> dict[str, Estimate]:
    """How far apart images of one prompt are, `diversity-seeds`, and images of different prompts, `diversity-prompts`,
    as the mean absolute difference per pixel, from 0 to 1, over all such pairs; and the first divided by the second,
    `diversity`: 0 if a prompt gives one image whatever the seed, 1 if the prompt makes no difference.

    What is estimated does not depend on the number of images. The standard errors are those of a jackknife over 20
    blocks of prompts; two prompts have none.

    Args:
        pixels: uint8 [N, D].
        prompts: the prompt [N] of each image.
    """
    _, index, counts = np.unique(prompts, return_inverse=True, return_counts=True)
    if len(counts) < 2 or counts.min() < 2:
        raise ValueError(
            f"diversity compares images of one prompt with those of others, and there are {len(index)} images of "
            f"{len(counts)} prompts: generate at least two prompts with --per-prompt 2 or more"
        )
    within = np.array([sum_of_distances(pixels[index == prompt]) for prompt in range(len(counts))])
    pairs = counts * (counts - 1) / 2

    def distances(kept: np.ndarray) -> tuple[float, float, float]:
        """The figures of some of the prompts."""
        images, total = counts[kept].sum(), sum_of_distances(pixels[np.isin(index, kept)])
        seeds = within[kept].sum() / pairs[kept].sum()
        others = (total - within[kept].sum()) / (images * (images - 1) / 2 - pairs[kept].sum())
        return seeds / others, seeds, others

    every = np.arange(len(counts))
    block = jackknife_blocks(len(counts))
    errors: list[float | None] = [None] * 3
    if len(counts) > 2 and block is not None:
        without = [distances(every[block != one]) for one in range(block.max() + 1)]
        errors = [jackknife_error(values) for values in zip(*without, strict=True)]
    names = ("diversity", "diversity-seeds", "diversity-prompts")
    return {
        name: Estimate(float(value), error) for name, value, error in zip(names, distances(every), errors, strict=True)
    }
