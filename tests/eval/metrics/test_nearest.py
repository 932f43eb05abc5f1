"""The nearest training example of an image, and how like it is."""

import numpy as np
import pytest
import torch

from arimage.eval.metrics.nearest import contrasts, likeness, nearest, nearest_estimates


class Listed:
    def __init__(self, pixels):
        self.pixels = torch.from_numpy(pixels)

    def __len__(self):
        return len(self.pixels)

    def read(self, images):
        return self.pixels[list(images)], torch.empty(0)


def pictures(count, seed):
    """Noise of patches, uint8 [count, 3, 16, 16]."""
    noise = np.random.default_rng(seed).integers(0, 256, (count, 3, 4, 4), dtype=np.uint8)
    return noise.repeat(4, 2).repeat(4, 3)


def test_copies_are_found_in_any_block_whatever_their_paper(device):
    train = pictures(40, 0)
    copies = train[[3, 39, 17]]
    darker = (copies // 2).astype(np.uint8)
    paler = (copies // 4 + 150).astype(np.uint8)
    values, index = nearest(
        np.concatenate([copies, darker, paler, pictures(20, 1)]), Listed(train), device=device, block=8
    )
    assert index[:9].tolist() == [3, 39, 17] * 3
    assert values[:3] == pytest.approx(1, abs=1e-4)
    assert (values[3:6] > 0.6).all() and values[9:].max() < 0.5
    whole = nearest(copies, Listed(train), device=device)
    assert whole[1].tolist() == [3, 39, 17] and whole[0] == pytest.approx(values[:3], abs=1e-5)


def test_likeness_is_the_jaccard_index_of_sets_and_ignores_the_mean_colour():
    some = torch.tensor([[1.0, 1, 1, 0, 0, 0]])
    assert likeness(some * 10, 10 * torch.tensor([[0.0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1]]))[
        0
    ].tolist() == pytest.approx([0.5, 0], abs=1e-4)
    pixels = torch.from_numpy(pictures(2, 0)) // 2
    assert torch.allclose(contrasts(pixels), contrasts(pixels + 40), atol=1e-5)


def test_pictures_of_one_colour_are_like_each_other_only():
    blank, drawn = np.full((1, 3, 16, 16), 255, np.uint8), pictures(1, 0)
    values, index = nearest(np.concatenate([blank, drawn]), Listed(np.concatenate([drawn, blank // 2])))
    assert index.tolist() == [1, 0] and values == pytest.approx(1, abs=1e-4)
    assert nearest(blank, Listed(drawn))[0] < 0.01


def test_the_median_and_the_shares_have_errors_over_prompts():
    values = np.array([0.2, 0.4, 0.5, 0.9, 0.96, 0.3])
    found = nearest_estimates(values)
    assert found["nearest"].value == pytest.approx(0.45) and found["nearest"].standard_error > 0
    assert [found[f"nearest-above-{least}"].value for least in (0.85, 0.95)] == pytest.approx([2 / 6, 1 / 6])
    one = nearest_estimates(values, ["a"] * 6)
    assert one["nearest"].standard_error is None and one["nearest-above-0.95"].interval is None
