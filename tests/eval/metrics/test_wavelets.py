"""The distance that needs no network."""

import numpy as np
import pytest
import torch
from eval.score_kit import save
from PIL import Image, ImageDraw, ImageFilter

from arimage.eval import score_images
from arimage.eval.metrics.wavelets import WaveletExtractor


def drawing(kind: str, rng: np.random.Generator) -> Image.Image:
    """A disc or a bar of any colour at any place."""
    image = Image.new("RGB", (48, 48), tuple(rng.integers(180, 255, 3).tolist()))
    x, y, size = (int(value) for value in (*rng.integers(4, 24, 2), rng.integers(8, 20)))
    fill = tuple(rng.integers(0, 160, 3).tolist())
    draw = ImageDraw.Draw(image)
    draw.ellipse((x, y, x + size, y + size), fill) if kind == "disc" else draw.rectangle((x, 2, x + 4, 44), fill)
    return image


def drawings(kind, seed, count=40):
    rng = np.random.default_rng(seed)
    return [drawing(kind, rng) for _ in range(count)]


def noisy(image, spread, rng):
    pixels = np.asarray(image) + rng.normal(0, spread, (48, 48, 3))
    return Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))


@pytest.fixture
def distance(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save(tmp_path / "real", [np.asarray(image) for image in [*drawings("disc", 0), *drawings("bar", 1)]])

    def of(name, images):
        folder = save(tmp_path / name, [np.asarray(image) for image in images])
        return score_images(folder, tmp_path / "real", metrics="fd-wavelets")["fd-wavelets"]

    return of


def test_it_is_0_for_equal_images_and_grows_with_blur_and_noise(distance):
    images = [*drawings("disc", 0), *drawings("bar", 1)]
    assert distance("same", images)["value"] == pytest.approx(0, abs=1e-9)
    rng = np.random.default_rng(0)
    blurred = [
        distance(f"blur-{radius}", [image.filter(ImageFilter.GaussianBlur(radius)) for image in images])["value"]
        for radius in (0.5, 1, 2)
    ]
    noised = [
        distance(f"noise-{spread}", [noisy(image, spread, rng) for image in images])["value"] for spread in (4, 12, 36)
    ]
    for values in (blurred, noised):
        assert 1e-3 < values[0] < values[1] < values[2]


def test_it_tells_other_colours_and_other_shares_of_what_is_shown(distance):
    of_both = distance("both", [*drawings("disc", 2), *drawings("bar", 3)])
    of_discs = distance("discs", drawings("disc", 4, 80))
    assert of_discs["value"] > 2 * of_both["value"]
    swapped = [Image.merge("RGB", image.split()[::-1]) for image in drawings("disc", 0)]
    tinted = [Image.blend(image, Image.new("RGB", image.size, "red"), 0.3) for image in swapped]
    assert distance("tinted", tinted)["value"] > of_discs["value"]
    assert of_both["standard_error"] > 0 and of_both["space"]["name"] == "colours-and-wavelets-228"


def test_features_are_colours_and_energies_of_wavelets():
    extractor = WaveletExtractor()
    plain, stripes = Image.new("RGB", (128, 128), (255, 0, 0)), Image.new("RGB", (128, 128))
    stripes.paste((255, 255, 255), (0, 0, 128, 128), Image.fromarray(np.tile([[0], [255]], (64, 128)).astype("uint8")))
    found = extractor([plain, stripes, stripes.rotate(90)])
    assert found.shape == (3, 228) and found.dtype == torch.float32
    colours, energies = found[:, :48].unflatten(1, (3, 16)), found[:, 48:].unflatten(1, (5, 3, 3, 4))
    assert colours[0].mean(1).tolist() == pytest.approx([0.299, 0.701, -0.299], abs=1e-5)
    assert energies[0].max() < 1e-3
    # The finest wavelets of one direction, in brightness.
    expected = torch.zeros(2, 5, 3, 3, 4)
    expected[0, 0, 0, 0] = expected[1, 0, 1, 0] = 0.5**0.5
    assert energies[1:].numpy() == pytest.approx(expected.numpy(), abs=2e-3)
