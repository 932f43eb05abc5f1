"""Patch tokenizers are fitted by the command that trains the others."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from arimage import PatchVQModel
from arimage.cli import main as cli


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from arimage.training.pixels import open_pixels  # noqa: E402
from arimage.training.recipe import TokenizerRecipe, load_recipe  # noqa: E402
from arimage.training.tokenizers.patches import PatchSettings, fit_codebook, plain  # noqa: E402


RECIPE = """
tokenizer = "PatchVQModel"
image_size = 16
[model]
patch_size = 4
codebook_size = {codes}
channels = 1
[training]
plain = 0.9
{more}
"""


def draw(folder, count, seed):
    """White pictures with a grey and an almost white bar."""
    folder.mkdir()
    places = np.random.default_rng(seed)
    for number in range(count):
        levels = np.full((16, 16, 3), 255, np.uint8)
        for level in (250, 30, 120):
            row, column = places.integers(0, 12, 2)
            levels[row : row + 4, column : column + 6] = level
        Image.fromarray(levels).save(folder / f"{number}.png")
    return folder


def run(monkeypatch, folder, codes=24, more=""):
    (folder / "patches.toml").write_text(RECIPE.format(codes=codes, more=more))
    words = ["--recipe", folder / "patches.toml", "--data", folder / "data", "--heldout", folder / "held"]
    words += ["--out", folder / "run", "--workers", 0, "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["arimage", "train", "tokenizer", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.fixture
def folder(tmp_path):
    draw(tmp_path / "data", 30, 0)
    draw(tmp_path / "held", 6, 1)
    return tmp_path


def test_a_codebook_is_fitted_and_its_psnr_is_printed(folder, monkeypatch, capsys):
    assert not run(monkeypatch, folder)
    out = folder / "run" / "tokenizer"
    vq = PatchVQModel.from_pretrained(out / "tokenizer")
    assert vq.config.codebook_size == 24 and (out / "reconstructions.png").is_file()
    held = open_pixels(folder / "held", 16).read(range(6))[0].float() / 127.5 - 1
    with torch.no_grad():
        errors = (vq.decode(vq.encode(held)) - held).square().flatten(1).mean(1)
    expected = float((4 / errors).log10().mean() * 10)
    (row,) = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    assert row["held-out PSNR"] == pytest.approx(expected, abs=0.01) and expected > 15
    assert capsys.readouterr().out.strip() == f"{out / 'tokenizer'}: {expected:.2f} dB"
    # Almost white patches are white.
    weights = vq.codebook.weight
    assert (weights == 1).all(1).any() and not ((weights > 0.9).all(1) & (weights < 1).any(1)).any()
    assert not run(monkeypatch, folder)
    assert torch.equal(PatchVQModel.from_pretrained(out / "tokenizer").codebook.weight, weights)


def test_patches_are_chosen_by_the_square_root_of_their_number(folder):
    pixels, vq = open_pixels(folder / "data", 16), PatchVQModel(4, 6, 1)
    fit_codebook(vq, pixels, PatchSettings(seed=1))
    centres = vq.codebook.weight.clone()
    fit_codebook(vq, pixels, PatchSettings(seed=2))
    # Blank patches are more than half, and take a code, not three.
    assert not torch.equal(vq.codebook.weight, centres) and (centres.mean(1) > 0.95).sum() <= 2
    fit_codebook(vq, pixels, PatchSettings(images=5, points=10, seed=1))
    assert not torch.equal(vq.codebook.weight, centres)


def test_plain_patches_keep_their_side():
    patches = torch.tensor([[0.95, 0.99], [-0.95, -0.92], [0.95, 0.8], [0.95, -0.95]])
    assert plain(patches, 0.9).tolist() == [[1, 1], [-1, -1], *patches[2:].tolist()]
    assert torch.equal(plain(patches, 1.0), patches)


def test_what_does_not_fit_is_refused_and_leaves_nothing(folder, monkeypatch, capsys):
    for codes, more, message in (
        (4000, "", "codebook_size is 4000, and the images have"),
        (24, "[optimizer]\nsteps = 3\nlearning_rate = 0.1", "optimizer is given, and a PatchVQModel"),
        (24, "batch_size = 3", "batch_size is not a setting"),
    ):
        assert run(monkeypatch, folder, codes, more) == 2
        assert message in capsys.readouterr().err and not (folder / "run").exists()
    (folder / "vq.toml").write_text('tokenizer = "LlamaGenVQModel"\nimage_size = 16\n[model]\nchannels = 8\n')
    with pytest.raises(ValueError, match="optimizer is missing: add it"):
        load_recipe(folder / "vq.toml", TokenizerRecipe)
