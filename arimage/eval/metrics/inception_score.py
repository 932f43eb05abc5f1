"""Inception score of images (https://arxiv.org/abs/1606.03498), which needs no reference."""

from itertools import pairwise

import numpy as np

from .standard_errors import Estimate, Prompts, jackknife_blocks, jackknife_error


def inception_score(
    logits: np.ndarray, *, prompts: Prompts | None = None, splits: int = 10, seed: int = 2020
) -> Estimate:
    """The exponential of the mean KL divergence between the class probabilities of an image and their mean over the
    images, averaged over `splits` parts of the images in a random order.

    The order and the parts are those of torch-fidelity. The evaluator of ADM takes parts of 5,000 images in the order
    of the file, which are ten of 50,000 images too, and is the same for images in random order. The score rises with
    the number of images per part: compare only figures of equally many images.

    The standard error is that of a jackknife over 20 blocks of prompts, too high for few images per class; other
    libraries print the spread over the parts instead. One prompt has none.

    Args:
        logits: [N, classes] of the images, before the softmax.
        prompts: the prompt [N] of each image; by default each has its own.
        seed: of the order.

    Raises:
        ValueError: if there are fewer images than parts.
    """
    from scipy.special import entr, log_softmax

    if len(logits) < splits:
        raise ValueError(f"an Inception score needs at least {splits} images, and there are {len(logits)}: give more")
    order = np.random.RandomState(seed).permutation(len(logits))
    logs = log_softmax(logits[order].astype(np.float64), axis=1)
    probabilities = np.exp(logs)
    # The mean KL divergence is the entropy of the mean minus the mean of the entropies, which are the last column.
    rows = np.concatenate([probabilities, -(probabilities * logs).sum(1, keepdims=True)], axis=1)
    blocks = jackknife_blocks(len(rows), None if prompts is None else np.asarray(prompts)[order])
    block = np.zeros(len(rows), int) if blocks is None else blocks
    # Images stay in their parts when others are left out, so that the choice of parts adds nothing to the error.
    bounds = [i * len(rows) // splits for i in range(splits + 1)]
    sums = np.zeros((block.max() + 1, splits, rows.shape[1]))
    counts = np.zeros((block.max() + 1, splits, 1), int)
    for part, (begin, end) in enumerate(pairwise(bounds)):
        np.add.at(sums[:, part], block[begin:end], rows[begin:end])
        np.add.at(counts[:, part], block[begin:end], 1)

    def score(sums: np.ndarray, counts: np.ndarray) -> float:
        means = (sums / counts.clip(min=1))[counts[:, 0] > 0]
        return float(np.exp(entr(means[:, :-1]).sum(1) - means[:, -1]).mean())

    every, number = sums.sum(0), counts.sum(0)
    error = None
    if blocks is not None:
        error = jackknife_error([score(every - sums[one], number - counts[one]) for one in range(len(sums))])
    return Estimate(score(every, number), error)
