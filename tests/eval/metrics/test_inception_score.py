"""The Inception score, against torch-fidelity and its definition."""

import numpy as np
import pytest
import torch
from torch_fidelity.metric_isc import isc_features_to_metric

from arimage.eval.metrics.inception_score import inception_score


def sample(count, seed, classes=12, sharpness=3.0):
    return (np.random.default_rng(seed).normal(size=(count, classes)) * sharpness).astype(np.float32)


# As many images in each part, not as many, and parts of one image.
@pytest.mark.parametrize("count", [200, 137, 10])
def test_the_score_is_that_of_torch_fidelity(count):
    logits = sample(count, 1)
    theirs = isc_features_to_metric(torch.from_numpy(logits))["inception_score_mean"]
    assert inception_score(logits).value == pytest.approx(theirs, rel=1e-9)
    assert theirs > 1.5 or count == 10


def test_one_part_is_the_exponential_of_the_mean_divergence():
    logits = sample(40, 2)
    probabilities = [np.exp(row) / np.exp(row).sum() for row in logits.astype(np.float64)]
    marginal = np.mean(probabilities, axis=0)
    divergences = [sum(p * np.log(p / q) for p, q in zip(one, marginal, strict=True)) for one in probabilities]
    assert inception_score(logits, splits=1).value == pytest.approx(np.exp(np.mean(divergences)), rel=1e-9)


def test_standard_errors_are_the_spread_of_repeated_samples():
    # With few images per class the jackknife gives more than the spread.
    prompts = np.arange(600).repeat(2)
    for repeats, of in (
        ([sample(1200, seed) for seed in range(40)], None),
        ([sample(600, seed).repeat(2, 0) for seed in range(40)], prompts),
    ):
        found = [inception_score(logits, prompts=of) for logits in repeats]
        spread = np.std([estimate.value for estimate in found], ddof=1)
        assert np.mean([estimate.standard_error for estimate in found]) == pytest.approx(spread, rel=0.4)
    assert inception_score(sample(40, 0), prompts=["one"] * 40).standard_error is None


def test_fewer_images_than_parts_are_refused():
    with pytest.raises(ValueError, match="needs at least 10 images, and there are 9"):
        inception_score(sample(9, 0))
