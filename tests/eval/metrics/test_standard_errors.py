"""Standard errors and intervals, where they are known."""

import numpy as np
import pytest

from arimage.eval.metrics.standard_errors import jackknife_standard_error, mean_estimate, paired_difference


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=2000)
    known = values.std(ddof=1) / np.sqrt(2000)
    # As many blocks as values: the two are one formula.
    assert jackknife_standard_error(np.mean, values, blocks=2000) == pytest.approx(known, rel=1e-9)
    few = [jackknife_standard_error(np.mean, values, seed=seed) for seed in range(50)]
    assert np.mean(few) == pytest.approx(known, rel=0.1)


def test_the_interval_of_a_mean_holds_it_in_19_of_20_samples():
    rng = np.random.default_rng(0)
    estimates = [mean_estimate(rng.exponential(size=80), resamples=300) for _ in range(120)]
    held = np.mean([low <= 1 <= high for low, high in (estimate.interval for estimate in estimates)])
    assert 0.86 <= held <= 0.99
    first = estimates[0]
    assert first.interval[1] - first.interval[0] == pytest.approx(2 * 1.96 * first.standard_error, rel=0.15)


def test_pairs_cancel_what_they_share():
    rng = np.random.default_rng(0)
    baseline = rng.normal(size=300)
    values = baseline + 0.05 + 0.1 * rng.normal(size=300)
    difference = paired_difference(values, baseline)
    assert difference.value == pytest.approx(0.05, abs=0.02) and difference.interval[0] > 0
    assert difference.standard_error < mean_estimate(values).standard_error / 5
    with pytest.raises(ValueError, match="300 values cannot be paired with 299"):
        paired_difference(values, baseline[1:])
