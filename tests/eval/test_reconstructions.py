"""`arimage eval tokenizer`: images next to what an image tokenizer makes of them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from eval.score_kit import Moments, pictures, save
from families import EVERY
from PIL import Image
from scipy.ndimage import gaussian_filter

from arimage.eval import download
from arimage.eval.download import load_inception
from arimage.eval.metrics import pairs
from arimage.eval.metrics.frechet import Gaussian, frechet_distance
from arimage.eval.metrics.pairs import Lpips, psnr, ssim
from arimage.eval.reconstructions import check_reconstructs, reconstruct, score_tokenizer
from arimage.media.files import read_image
from arimage.training.tokens.views import centre_crop


def noise(count, seed, side=32):
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(seed))


def gray(side, seed):
    """Smooth gray pictures, whose colours are equal."""
    return gaussian_filter(np.random.default_rng(seed).random((side, side)), 2)


@pytest.fixture(params=["llamagen-text", "var-text", "arpg", "halton-maskgit-class", "lumina-dimoo", "mar"])
def pipe(request):
    return EVERY[request.param]()


def test_psnr_is_that_of_the_squared_error():
    images = noise(2, 0)
    shifted = images + torch.tensor([0.1, 0.01])[:, None, None, None]
    assert psnr(shifted, images).tolist() == pytest.approx([20, 40], abs=1e-3)
    assert psnr(images, images).tolist() == [pytest.approx(60)] * 2


def test_ssim_is_that_of_its_definition():
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    x, y = gray(64, 0), gray(64, 1)

    def blur(values):
        return gaussian_filter(values, 1.5, radius=5, mode="mirror")

    mean, other = blur(x), blur(y)
    variances = blur(x * x) - mean**2 + blur(y * y) - other**2
    covariance = blur(x * y) - mean * other
    c1, c2 = 0.01**2, 0.03**2
    map_ = (2 * mean * other + c1) * (2 * covariance + c2) / ((mean**2 + other**2 + c1) * (variances + c2))
    images, originals = (torch.from_numpy(one).float().expand(1, 3, 64, 64) for one in (x, y))
    assert float(ssim(images, originals)) == pytest.approx(map_.mean(), rel=1e-4)
    assert ssim(noise(2, 0), noise(2, 0)).tolist() == pytest.approx([1, 1])


def test_lpips_of_random_weights_is_0_for_equal_images_only(tmp_path, monkeypatch):
    pytest.importorskip("torchmetrics", reason="the extra `eval` is not installed")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    alexnet_url = pairs.ALEXNET
    name = Path(pairs.ALEXNET).name
    with pytest.raises(ValueError, match=f"{name} .*--download"):
        Lpips()
    # A server of this machine that there is not.
    monkeypatch.setattr(pairs, "ALEXNET", f"http://127.0.0.1:9/{name}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(ConnectionError, match=f"cannot be downloaded .*put it at .*{name}"):
        Lpips(download=True)
    assert not list((tmp_path / "hub" / "checkpoints").iterdir())
    (tmp_path / "hub" / "checkpoints" / name).touch()
    alexnet, asked = torchvision.models.alexnet, []
    monkeypatch.setattr(torchvision.models, "alexnet", lambda weights: asked.append(weights) or alexnet())
    lpips, images = Lpips(), noise(2, 0, 64)
    # What torchvision takes is that file.
    assert asked[0].url == alexnet_url
    assert lpips(images, images).tolist() == pytest.approx([0, 0], abs=1e-7)
    assert (lpips(noise(2, 1, 64), images) > 1e-6).all()


def test_tokens_give_the_same_pixels_whatever_the_prompt(pipe):
    check_reconstructs(pipe, "tiny")
    size = pipe.image_sizes[0]
    pixels = (noise(2, 0, size[0]) * 255).byte()
    found = reconstruct(pipe, pixels, size)
    assert found.shape == pixels.shape and found.dtype == torch.uint8
    assert torch.equal(reconstruct(pipe, pixels[1:], size), found[1:])
    assert not torch.equal(found[0], found[1])


def test_figures_are_those_of_the_pairs(tmp_path, monkeypatch):
    pipe = EVERY["llamagen-text"]()
    side = pipe.image_sizes[0][0]
    folder = save(tmp_path / "images", pictures(12, 0))
    monkeypatch.setattr(download, "InceptionExtractor", Moments)
    found = score_tokenizer(pipe, folder, ["psnr", "rfid"], batch_size=5)
    assert list(found) == ["psnr", "rfid", "rfid-infinity"]
    files = sorted(folder.iterdir())
    crops = [np.asarray(centre_crop(read_image(path), (side, side))) for path in files]
    originals = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)
    decoded = torch.cat([reconstruct(pipe, some, (side, side)) for some in originals.split(5)])
    ratios = psnr(decoded.float() / 255, originals.float() / 255)
    assert found["psnr"]["value"] == pytest.approx(float(ratios.mean()), rel=1e-6)
    assert found["psnr"]["standard_error"] == pytest.approx(float(ratios.std()) / 12**0.5, rel=1e-5)
    ours, theirs = (
        Moments(None)([Image.fromarray(one) for one in pixels.permute(0, 2, 3, 1).numpy()]).numpy()
        for pixels in (decoded, originals)
    )
    assert found["rfid"]["value"] == pytest.approx(frechet_distance(ours, Gaussian.of_features(theirs)), rel=1e-6)
    assert found["rfid"]["count"] == 12 and f"12 pictures at {side}x{side}" in found["rfid"]["reference"]
    with pytest.raises(ValueError, match="unknown metric 'fid' of image tokenizers"):
        score_tokenizer(pipe, folder, ["fid"])


def test_networks_are_fetched_only_if_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(download, "fetch_file", lambda file: tmp_path / file.name)
    monkeypatch.setattr(download, "InceptionExtractor", lambda path, *_: path)
    assert load_inception(None, "clean", True, "cpu") == tmp_path / "inception-2015-12-05.pt"
    assert load_inception(None, "clean", False, "cpu") is None
    assert load_inception(tmp_path / "own.pt", "clean", True, "cpu") == tmp_path / "own.pt"


def test_the_command_prints_and_writes(tmp_path, command, refused):
    folder = save(tmp_path / "images", pictures(3, 0))
    EVERY["llamagen-text"]().save_pretrained(tmp_path / "model")
    words = ("eval", "tokenizer", folder, "--metrics", "psnr", "--device", "cpu", "--model")
    code, out, _ = command(*words, tmp_path / "model", "--out", tmp_path / "figures.json")
    assert code == 0 and out.startswith("psnr: ") and "3 images" in out
    assert json.loads((tmp_path / "figures.json").read_text())["psnr"]["count"] == 3
    (folder / "damaged.png").write_bytes(b"no picture")
    assert "damaged.png" in refused(*words, tmp_path / "model")
    code, again, _ = command(*words, tmp_path / "model", "--skip-damaged")
    assert code == 0 and "1 damaged" in again and "3 pictures" in again
    assert again.startswith(out.partition(" (")[0])
    EVERY["latent-llama"]().save_pretrained(tmp_path / "other")
    assert "does not encode images" in refused(*words, tmp_path / "other")
