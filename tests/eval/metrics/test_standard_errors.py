"""Standard errors and intervals, where they are known."""

import numpy as np
import pytest
from scipy.stats import binomtest

from arimage.eval.metrics.standard_errors import (
    estimate_text,
    jackknife_blocks,
    jackknife_error,
    mean_estimate,
    paired_difference,
)


def jackknife(values, prompts=None, **settings):
    """The standard error of a mean."""
    block = jackknife_blocks(len(values), prompts, **settings)
    return None if block is None else jackknife_error([values[block != one].mean() for one in range(block.max() + 1)])


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=2000)
    known = values.std(ddof=1) / np.sqrt(2000)
    # As many blocks as values: the two are one formula.
    assert jackknife(values, blocks=2000) == pytest.approx(known, rel=1e-9)
    assert np.mean([jackknife(values, seed=seed) for seed in range(50)]) == pytest.approx(known, rel=0.1)


def test_the_jackknife_leaves_out_whole_prompts():
    rng, prompts = np.random.default_rng(0), np.arange(100).repeat(4)
    values = rng.normal(size=100).repeat(4)
    assert jackknife(values, prompts, blocks=100) == pytest.approx(values[::4].std(ddof=1) / 10, rel=1e-9)
    assert jackknife(values, ["one"] * 400) is None and jackknife(np.ones(40)) is None


@pytest.mark.parametrize("per_prompt", [1, 4])
def test_the_interval_of_a_mean_holds_it_in_19_of_20_samples(per_prompt):
    rng, prompts = np.random.default_rng(0), np.arange(80).repeat(per_prompt)
    estimates = [mean_estimate(rng.exponential(size=80).repeat(per_prompt), prompts) for _ in range(300)]
    held = np.mean([low <= 1 <= high for low, high in (estimate.interval for estimate in estimates)])
    assert 0.9 <= held <= 0.98
    first = estimates[0]
    assert first.interval[1] - first.interval[0] == pytest.approx(2 * 1.96 * first.standard_error, rel=0.05)


def test_the_interval_of_a_share_is_wilsons():
    for hits, count in ((331, 336), (336, 336), (0, 4), (4, 4), (1, 2)):
        found = mean_estimate(np.arange(count) < hits)
        expected = binomtest(hits, count).proportion_ci(method="wilson")
        assert found.interval == pytest.approx((expected.low, expected.high), abs=1e-9)
        assert found.interval[0] <= found.value <= found.interval[1] and found.standard_error > 0


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["share", "difference"])
@pytest.mark.parametrize(("prompts", "per_prompt"), [(4, 20), (30, 5), (336, 3), (336, 1)])
def test_intervals_of_shares_hold_them_whatever_the_images_per_prompt(prompts, per_prompt, kind):
    rng, ids = np.random.default_rng(0), np.arange(prompts).repeat(per_prompt)

    def outcomes():
        return (rng.random((prompts, per_prompt)) < rng.beta(3, 1, size=(prompts, 1))).ravel()

    held, errors, values = [], [], []
    for _ in range(300):
        found = mean_estimate(outcomes(), ids) if kind == "share" else paired_difference(outcomes(), outcomes(), ids)
        low, high = found.interval
        held.append(low <= (0.75 if kind == "share" else 0) <= high)
        errors.append(found.standard_error)
        values.append(found.value)
    assert 0.92 <= np.mean(held)
    if prompts > 30:
        assert np.mean(errors) == pytest.approx(np.std(values), rel=0.15) and np.mean(held) <= 0.98


def test_images_that_are_all_alike_leave_an_interval():
    for hits in (np.ones(12), np.zeros(12)):
        for prompts in (None, np.arange(4).repeat(3)):
            found, same = mean_estimate(hits, prompts), paired_difference(hits, hits, prompts)
            assert found.interval[1] - found.interval[0] > 0.2 and same.interval[0] < -0.1 and same.interval[1] > 0.1
            assert found.standard_error > 0 and same.standard_error > 0
    # Twelve images of four prompts know what four images do.
    assert mean_estimate(np.ones(12), np.arange(4).repeat(3)).interval == mean_estimate(np.ones(4)).interval


def test_one_prompt_and_equal_numbers_have_no_error():
    for found in (
        mean_estimate(np.array([1, 0, 1]), ["a"] * 3),
        mean_estimate(np.ones(1)),
        mean_estimate(np.full(5, 0.3)),
        paired_difference(np.full(5, 0.3), np.full(5, 0.1)),
        paired_difference(np.ones(3), np.zeros(3), ["a"] * 3),
    ):
        assert found.standard_error is None and found.interval is None


def test_figures_are_written_with_as_many_decimals_as_they_are_known():
    assert estimate_text(1.0, 0.0029, (0.98870, 1.0)) == "1.000 (0.989 to 1.000)"
    assert estimate_text(0.01234, 0.00056, None) == "0.01234 ± 0.00056"
    assert estimate_text(0.0074, 0.004, (-0.0018, 0.0161), sign="+") == "+0.007 (-0.002 to +0.016)"
    assert estimate_text(0.5, None, None) == "0.5"
    # As earlier versions stored it for four hits of four.
    assert estimate_text(1.0, 0.0, [1.0, 1.0]) == "1"


def test_pairs_cancel_what_they_share():
    rng = np.random.default_rng(0)
    baseline = rng.normal(size=300)
    values = baseline + 0.05 + 0.1 * rng.normal(size=300)
    difference = paired_difference(values, baseline)
    assert difference.value == pytest.approx(0.05, abs=0.02) and difference.interval[0] > 0
    assert difference.standard_error < mean_estimate(values).standard_error / 5
    with pytest.raises(ValueError, match="300 values cannot be paired with 299"):
        paired_difference(values, baseline[1:])
