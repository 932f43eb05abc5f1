"""Distances between sets of features, against the libraries that others take them from."""

import cleanfid.fid
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from arimage.eval.metrics.frechet import FrechetDistance, Gaussian, frechet_distance, to_double
from arimage.eval.metrics.kernel_distance import gaussian_kernel_distance, kernel_distance
from arimage.eval.metrics.neighbourhoods import neighbourhoods
from arimage.eval.metrics.standard_errors import jackknife_blocks, jackknife_error, standard_error


def sample(count, width, seed, shift=0.0, gain=1.0):
    """Correlated features of falling spread, like those of a network."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(0).normal(size=(width, width)) / np.arange(1, width + 1)[:, None] ** 0.5
    return (np.abs(rng.normal(size=(count, width)) @ mix * gain / 4 + shift)).astype(np.float32)


# More images than features, fewer, and fewer of the reference alone.
SIZES = [(300, 400, 48), (40, 400, 96), (40, 50, 96), (300, 60, 96)]


@pytest.mark.parametrize(("count", "others", "width"), SIZES)
def test_frechet_distance_is_that_of_torch_fidelity(count, others, width):
    x, y = (torch.from_numpy(f).double() for f in (sample(count, width, 1, 0.2), sample(others, width, 2)))
    statistics = [fid_features_to_statistics(features) for features in (x, y)]
    theirs = fid_statistics_to_metric(*statistics, verbose=False)["frechet_inception_distance"]
    assert frechet_distance(x.numpy(), Gaussian.of_features(y.numpy())) == pytest.approx(theirs, rel=1e-6)
    of_file = Gaussian.of_covariance(statistics[1]["mu"], statistics[1]["sigma"])
    assert frechet_distance(x.numpy(), of_file) == pytest.approx(theirs, rel=1e-6)


def test_frechet_distance_of_known_distributions():
    # Two axes: means 3 apart on the first, deviations 1 and 2 on the second.
    x = np.array([[0, 1], [0, -1], [0, 1], [0, -1]], np.float64) * np.sqrt(3 / 4)
    y = x * [1, 2] + [3, 0]
    assert frechet_distance(x, Gaussian.of_features(y)) == pytest.approx(9 + 1)
    assert frechet_distance(x, Gaussian.of_features(x)) == pytest.approx(0, abs=1e-7)
    with pytest.raises(ValueError, match="at least 2 images"):
        frechet_distance(x[:1], Gaussian.of_features(y))
    with pytest.raises(ValueError, match="at least 3 images, not 2"):
        FrechetDistance(x[:2], Gaussian.of_features(y)).estimate()
    with pytest.raises(ValueError, match="2 features .* 3"):
        frechet_distance(np.zeros((4, 3)), Gaussian.of_features(y))


@pytest.mark.parametrize(("count", "others", "width"), [*SIZES, (60, 80, 48), (50, 400, 48)])
def test_a_distance_without_each_image_is_that_of_the_others(count, others, width):
    x, gaussian = sample(count, width, 0), Gaussian.of_features(sample(others, width, 1, 0.1, 1.2))
    distance, one_by_one = FrechetDistance(x, gaussian), []
    for image in range(count):
        one_by_one.append(frechet_distance(np.delete(x, image, axis=0), gaussian))
    assert distance.without_each().numpy() == pytest.approx(np.array(one_by_one), abs=1e-7 * distance.value)
    prompts = np.arange(count) // 3
    for of in (None, prompts):
        expected = standard_error((count - 1) * np.array(one_by_one), of)
        assert distance.estimate(of).standard_error == pytest.approx(expected, rel=1e-6)
    assert distance.estimate().value == pytest.approx(frechet_distance(x, gaussian), rel=1e-8)


@pytest.mark.parametrize("count", [200, 60, 30])
def test_the_error_of_a_distance_is_the_spread_over_other_images(count):
    gaussian = Gaussian.of_features(sample(500, 24, 99))
    found = [FrechetDistance(sample(count, 24, seed, 0.1, 1.1), gaussian).estimate() for seed in range(60)]
    spread = np.std([estimate.value for estimate in found], ddof=1)
    assert np.mean([estimate.standard_error for estimate in found]) == pytest.approx(spread, rel=0.25)
    x, rng = sample(200, 24, 0, 0.1, 1.1), np.random.default_rng(0)
    draws = [frechet_distance(x[rng.integers(0, 200, 200)], gaussian) for _ in range(100)]
    assert found[0].standard_error == pytest.approx(np.std(draws, ddof=1), rel=0.25) or count < 200


def test_the_limit_of_a_distance_is_where_the_line_through_all_but_one_ends():
    x, gaussian = sample(60, 24, 0), Gaussian.of_features(sample(400, 24, 1, 0.1, 1.2))
    others = np.mean([frechet_distance(np.delete(x, image, 0), gaussian) for image in range(60)])
    line = np.polyfit([1 / 60, 1 / 59], [frechet_distance(x, gaussian), others], 1)
    assert FrechetDistance(x, gaussian).infinity() == pytest.approx(line[1], rel=1e-6)


def test_a_distance_with_its_error_and_limit_takes_one_decomposition(monkeypatch):
    x, gaussian = sample(400, 24, 0), Gaussian.of_features(sample(400, 24, 1))
    calls = []
    for name in ("eigh", "eigvalsh"):
        function = getattr(torch.linalg, name)
        monkeypatch.setattr(torch.linalg, name, lambda m, f=function, name=name: calls.append(name) or f(m))
    distance = FrechetDistance(x, gaussian)
    distance.estimate(), distance.infinity()
    assert calls == ["eigh"]


@pytest.mark.parametrize("count", [40, 20])
def test_a_distance_and_its_error_stay_on_the_device_of_the_reference(count):
    x = sample(count, 24, 0)
    with FakeTensorMode(), torch.device("cuda"):
        gaussian = Gaussian(torch.zeros(24, dtype=torch.float64), torch.eye(24, dtype=torch.float64))
        distance = FrechetDistance(x, gaussian)
        assert distance.without_each().device.type == distance._projected.device.type == "cuda"
        assert distance.without_each().dtype == torch.float64
    # Apple's GPUs have no float64.
    assert to_double(x, "mps").device.type == "cpu"


@pytest.mark.gpu
def test_a_gpu_gives_the_same_distances():
    x, y = sample(300, 96, 0), sample(400, 96, 1, 0.1, 1.2)
    ours, theirs = (FrechetDistance(x, Gaussian.of_features(y, device)) for device in ("cuda", "cpu"))
    assert ours.estimate() == pytest.approx(theirs.estimate(), rel=1e-8)
    assert ours.infinity() == pytest.approx(theirs.infinity(), rel=1e-8)


def test_the_factor_of_a_singular_covariance_gives_it_again():
    features = sample(100, 12, 0)
    features[:, 3] = 0
    gaussian, singular = Gaussian.of_features(features), np.cov(features.astype(np.float64), rowvar=False)
    assert (gaussian.factor.T @ gaussian.factor).numpy() == pytest.approx(singular, abs=1e-12)


def test_several_images_of_a_prompt_are_not_independent():
    reference, prompts = sample(300, 12, 99), np.arange(60).repeat(4)
    gaussian = Gaussian.of_features(reference)
    # Four images of a prompt that are all but equal.
    repeats = [sample(60, 12, seed, 0.1, 1.1).repeat(4, 0) + 0.01 * sample(240, 12, seed + 1000) for seed in range(30)]
    for estimates in (
        [FrechetDistance(images, gaussian).estimate(prompts) for images in repeats],
        [kernel_distance(images, reference, prompts=prompts, subsets=10, subset_size=100) for images in repeats],
        [neighbourhoods(images, reference, prompts=prompts)["density"] for images in repeats],
    ):
        spread = np.std([estimate.value for estimate in estimates], ddof=1)
        assert np.mean([estimate.standard_error for estimate in estimates]) == pytest.approx(spread, rel=0.4)
    assert kernel_distance(repeats[0], reference, prompts=["one"] * 240).standard_error is None
    assert FrechetDistance(repeats[0], gaussian).estimate(["one"] * 240).standard_error is None


def test_frechet_infinity_forgets_the_number_of_images():
    reference_gaussian = Gaussian.of_covariance(np.zeros(32), np.eye(32))
    images = [np.random.default_rng(seed).normal(size=(1000, 32)) * 1.1 for seed in range(20)]
    truth = 32 * 0.1**2
    assert frechet_distance(images[0], reference_gaussian) > truth * 1.5
    limits = [FrechetDistance(some, reference_gaussian).infinity() for some in images]
    assert np.mean(limits) == pytest.approx(truth, rel=0.1)


def test_kernel_distance_is_that_of_the_libraries():
    x, y = sample(120, 24, 1, 0.2), sample(120, 24, 2)
    ours = kernel_distance(x, y)
    assert ours.value == pytest.approx(cleanfid.fid.kernel_distance(*map(np.float64, (x, y)), 1), rel=1e-6)
    theirs = kid_features_to_metric(
        *(torch.from_numpy(f).double() for f in (x, y)), kid_subsets=1, kid_subset_size=120, verbose=False
    )
    assert ours.value == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-6)


def test_kernel_distance_of_subsets_is_near_that_of_all_and_repeats():
    x, y = sample(400, 24, 1, 0.2), sample(400, 24, 2)
    whole, parts = kernel_distance(x, y), kernel_distance(x, y, subset_size=100)
    assert parts.value == pytest.approx(whole.value, abs=3 * parts.standard_error) and parts.value != whole.value
    state = np.random.get_state()[1].copy()
    assert kernel_distance(x, y, subset_size=100) == parts
    assert (np.random.get_state()[1] == state).all()
    with pytest.raises(ValueError, match="at least 2 images"):
        kernel_distance(x[:1], y)


def explicit_cmmd(x, y):
    """The maximum mean discrepancy of the definition, pair by pair."""

    def mean(these, those):
        return np.mean([[np.exp(-((one - other) ** 2).sum() / (2 * 10**2)) for other in those] for one in these])

    return 1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y))


def unit(features):
    return features / np.linalg.norm(features, axis=1, keepdims=True)


@pytest.mark.parametrize("rows", [512, 7])
def test_the_gaussian_kernel_distance_is_that_of_its_definition(rows):
    x, y = unit(sample(50, 24, 1, 0.2)), unit(sample(40, 24, 2))
    found = gaussian_kernel_distance(x, y, rows=rows)
    theirs = explicit_cmmd(x.astype(np.float64), y.astype(np.float64))
    assert theirs > 0.01 and found.value == pytest.approx(theirs, rel=1e-9)
    assert gaussian_kernel_distance(x, x, rows=rows).value == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_the_error_of_the_gaussian_kernel_distance_is_a_jackknife():
    x, y = (unit(one.astype(np.float64)) for one in (sample(60, 12, 1, 0.2), sample(40, 12, 2)))
    prompts = np.arange(20).repeat(3)
    for of in (prompts, None):
        block = jackknife_blocks(len(x), of)
        explicit = jackknife_error([explicit_cmmd(x[block != one], y) for one in range(20)])
        assert gaussian_kernel_distance(x, y, prompts=of).standard_error == pytest.approx(explicit, rel=1e-6)
    assert gaussian_kernel_distance(x, y, prompts=["one"] * 60).standard_error is None
    with pytest.raises(ValueError, match="4 features .* 12"):
        gaussian_kernel_distance(x, y[:, :4])


@pytest.mark.parametrize("block", [512, 7])
def test_precision_and_recall_are_those_of_torch_fidelity(block):
    x, y = sample(150, 6, 1, 0.3, 1.5), sample(210, 6, 2)
    ours = neighbourhoods(x, y, k=3, block=block)
    theirs = prc_features_to_metric(torch.from_numpy(x), torch.from_numpy(y), prc_neighborhood=3, verbose=False)
    assert 0.2 < theirs["precision"] < 0.95 and 0.2 < theirs["recall"] < 0.95
    assert ours["precision"].value == pytest.approx(theirs["precision"], rel=1e-6)
    assert ours["recall"].value == pytest.approx(theirs["recall"], rel=1e-6)


@pytest.mark.parametrize("block", [512, 7])
def test_density_and_coverage_count_what_their_definitions_count(block):
    x, y = sample(60, 6, 1, 0.3, 1.5).astype(np.float64), sample(80, 6, 2).astype(np.float64)
    radii = [sorted(np.linalg.norm(one - other) for other in y)[5] for one in y]
    inside = np.array(
        [[np.linalg.norm(image - one) <= radius for one, radius in zip(y, radii, strict=True)] for image in x]
    )
    ours = neighbourhoods(x.astype(np.float32), y.astype(np.float32), density_k=5, block=block)
    assert ours["density"].value == pytest.approx(inside.sum() / (5 * 60), rel=1e-6)
    assert ours["coverage"].value == pytest.approx(inside.any(0).mean(), rel=1e-6)
    with pytest.raises(ValueError, match="5 neighbours"):
        neighbourhoods(x[:5], y)
