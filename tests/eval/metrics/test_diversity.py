"""How far apart images of one prompt and of different prompts are."""

import itertools

import numpy as np
import pytest

from arimage.eval.metrics.diversity import diversity, sum_of_distances


def test_the_sum_over_all_pairs_is_that_of_each_pair():
    pixels = np.random.default_rng(0).integers(0, 256, (7, 2500), dtype=np.uint8)
    pairs = [np.abs(a.astype(float) - b).mean() / 255 for a, b in itertools.combinations(pixels, 2)]
    assert sum_of_distances(pixels) == pytest.approx(sum(pairs), rel=1e-9)


def test_a_prompt_that_gives_one_image_and_one_that_makes_no_difference():
    rng = np.random.default_rng(0)
    prompts = np.repeat([*"abcdef"], 3)
    same = diversity(rng.integers(0, 256, (6, 12), dtype=np.uint8).repeat(3, 0), prompts)
    assert same["diversity"].value == same["diversity-seeds"].value == 0 < same["diversity-prompts"].value
    noise = diversity(rng.integers(0, 256, (18, 4000), dtype=np.uint8), prompts)
    assert noise["diversity"].value == pytest.approx(1, abs=0.01)
    # Two random pixels are a third apart.
    assert noise["diversity-seeds"].value == pytest.approx(1 / 3, abs=0.01)


@pytest.mark.parametrize("per_prompt", [2, 4])
def test_what_is_estimated_does_not_depend_on_how_many_images_there_are_and_errors_are_the_spread_over_prompts(
    per_prompt,
):
    rng = np.random.default_rng(0)

    def figures() -> dict:
        centres, spread = rng.normal(128, 30, (40, 1, 1)), rng.uniform(5, 15, (40, 1, 1))
        images = centres + spread * rng.normal(size=(40, per_prompt, 8))
        return diversity(images.clip(0, 255).astype(np.uint8).reshape(-1, 8), np.arange(40).repeat(per_prompt))

    runs = [figures() for _ in range(60)]
    for name in runs[0]:
        values, errors = ([getattr(run[name], what) for run in runs] for what in ("value", "standard_error"))
        assert np.mean(errors) == pytest.approx(np.std(values), rel=0.4)
    assert np.mean([run["diversity-seeds"].value for run in runs]) == pytest.approx(0.0443, rel=0.03)


def test_images_without_others_of_their_prompt_are_refused():
    pixels = np.zeros((3, 4), np.uint8)
    for prompts in (["a", "a", "a"], ["a", "b", "c"], ["a", "a", "b"]):
        with pytest.raises(ValueError, match="--per-prompt 2"):
            diversity(pixels, np.array(prompts))
    assert (
        diversity(pixels[[0, 0, 1, 1]] + np.array([[0], [0], [9], [9]], np.uint8), np.array([*"aabb"]))[
            "diversity"
        ].standard_error
        is None
    )
