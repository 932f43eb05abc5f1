"""A multi-scale tokenizer trains on a folder of images, from another tokenizer's weights, and goes on after an
interruption."""

import copy
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from arimage.cli.options import fast_dtype
from arimage.settings.schema import check
from arimage.tokenizers.vq_llamagen import LlamaGenVQModel
from arimage.tokenizers.vq_var import VARVQModel
from arimage.training.data.pictures import to_unit_range
from arimage.training.loop import OptimizerSettings
from arimage.training.pixels import open_pixels
from arimage.training.recipe import TokenizerRecipe
from arimage.training.tokenizers.tokenizer import (
    TokenizerSettings,
    TokenizerTask,
    new_tokenizer,
    run_tokenizer,
    take_over,
)


SIZE = 16
WIDTHS = {"channels": 8, "channel_multipliers": [1, 2, 2], "layers_per_block": 1, "norm_num_groups": 4}
RECIPE = {
    "tokenizer": "VARVQModel",
    "image_size": SIZE,
    "model": {**WIDTHS, "codebook_size": 32, "codebook_dim": 4, "scales": [1, 2, 4]},
    "optimizer": {"steps": 32, "learning_rate": 5e-3, "weight_decay": 0.0, "warmup_steps": 4, "ema_decay": 0.9},
    "training": {"batch_size": 8, "codebook_start": 6, "kmeans_batches": 4, "restart_every": 5, "max_shift": 1},
}


def run(folder, out, recipe=RECIPE, start_from=None):
    table = check(TokenizerRecipe, recipe | {"start_from": start_from}, "mine.toml")
    options = {"split": "train", "heldout_split": "train", "workers": 0}
    return run_tokenizer(table, folder, folder, out, "cpu", **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Discs of random colours, places and sizes; some files in a folder below."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "below").mkdir()
    generator = np.random.default_rng(0)
    y, x = np.mgrid[:32, :32]
    for i in range(12):
        picture = np.full((32, 32, 3), 255, np.uint8)
        inside = (x - generator.integers(8, 24)) ** 2 + (y - generator.integers(8, 24)) ** 2 < generator.integers(
            30, 120
        )
        picture[inside] = generator.integers(0, 200, 3)
        Image.fromarray(picture).save(folder / ("below" if i % 3 else ".") / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The folder of a finished run, and its losses by step."""
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        losses = record(monkeypatch)
        torch.manual_seed(1)
        run(folder, out)
    return out / "tokenizer", losses


def record(monkeypatch):
    losses, loss = {}, TokenizerTask.loss

    def recorded(self, step):
        value, figures = loss(self, step)
        losses[step] = {"total": float(value.detach()), **{name: float(x) for name, x in figures.items()}}
        return value, figures

    monkeypatch.setattr(TokenizerTask, "loss", recorded)
    return losses


# Folders of images


def test_a_folder_is_read_resized_and_cropped(tmp_path):
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = (250, 10, 20)
    Image.fromarray(wide).save(tmp_path / "b.jpg", quality=100, subsampling=0)
    transparent = np.zeros((8, 8, 4), np.uint8)
    transparent[:, :4] = (0, 90, 0, 255)
    (tmp_path / "below").mkdir()
    Image.fromarray(transparent).save(tmp_path / "below" / "A.WEBP", lossless=True)
    Image.fromarray(transparent[..., 3]).save(tmp_path / "c.png")
    (tmp_path / "notes.txt").write_text("no image")
    images, alpha = open_pixels(tmp_path, 8).read(range(3))
    assert images.dtype == alpha.dtype == torch.uint8
    assert images.shape == (3, 3, 8, 8) and alpha.shape == (3, 1, 8, 8)
    red = images[0].flatten(1).float()
    assert (red.mean(1) - torch.tensor([250.0, 10, 20])).abs().max() < 16
    assert alpha[0].min() == alpha[2].min() == 255
    assert images[1, :, 4, 0].tolist() == [0, 90, 0] and images[1, :, 4, 7].tolist() == [255] * 3
    assert alpha[1, 0, 4].tolist() == [255] * 4 + [0] * 4
    assert images[2, :, 4, 0].tolist() == [255] * 3 and images[2, :, 4, 7].tolist() == [0] * 3


# Training


@pytest.mark.slow
def test_the_loss_falls_and_the_record_is_kept(trained):
    out, losses = trained
    totals = [losses[step]["total"] for step in range(32)]
    assert sum(totals[-4:]) < 0.5 * sum(totals[:4])
    assert "codes used" not in losses[5] and losses[6]["codes used"] == 32
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert log[-1]["held-out PSNR"] > 11
    # The original and one picture a scale, twice in a row.
    assert Image.open(out / "reconstructions.png").size[0] == 8 * SIZE


@torch.no_grad()
def test_what_is_saved_is_what_was_trained(trained, folder):
    out, _ = trained
    vq = VARVQModel.from_pretrained(out / "tokenizer")
    codes = torch.load(out / "checkpoint.pt", weights_only=True)["buffers"]["quantiser.codebook.codes"]
    assert torch.equal(vq.codebook.weight, codes)
    images = to_unit_range(open_pixels(folder, SIZE).read(range(12))[0])
    maps = vq.encode(images)
    errors = [(vq.decode(maps[:k]).clamp(-1, 1) - images).pow(2).mean() for k in (1, 2, 3)]
    assert errors[2] < errors[1] < errors[0]
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    psnr = 10 * torch.log10(4 / (vq.decode(maps).clamp(-1, 1) - images).pow(2).flatten(1).mean(-1)).mean()
    # The log's is of the weights in the dtype of training.
    tolerance = 1e-3 if fast_dtype("cpu") == torch.float32 else 0.05
    assert float(psnr) == pytest.approx(log[-1]["held-out PSNR"], abs=tolerance)


def task_of(model, **settings):
    return TokenizerTask(
        model, None, None, TokenizerSettings(OptimizerSettings(steps=9, learning_rate=1e-3), **settings)
    )


@torch.no_grad()
def test_the_quantiser_in_training_is_that_of_the_model():
    torch.manual_seed(0)
    model = VARVQModel(**RECIPE["model"])
    task = task_of(model)
    images = torch.randint(256, (3, 3, SIZE, SIZE), dtype=torch.uint8)
    for phi in model.phi:
        torch.nn.init.normal_(phi.weight, std=0.1)
    _, points, codes = task.quantiser(task.encode(to_unit_range(images)))
    assert points.shape == (3 * 21, 4)
    maps = model.encode(to_unit_range(images))
    for scale, (side, flat) in enumerate(zip((1, 2, 4), codes.split([3, 12, 48]), strict=True)):
        assert torch.equal(flat.view(3, side, side), maps[scale])
    torch.testing.assert_close(task.quantised(images)[1], model.latents(maps[:2]))


def test_images_are_decoded_from_their_first_scales_at_their_share():
    torch.manual_seed(0)
    latents = torch.randn(400, 4, 4, 4)
    chosen = {}
    for share in (0.0, 0.5):
        task = task_of(VARVQModel(**RECIPE["model"]), partial_share=share)
        partial = task.quantiser(latents)[0]
        decoded, _ = task.quantise(1, latents)
        matches = torch.stack([torch.isclose(decoded, one, atol=1e-5).flatten(1).all(1) for one in partial])
        assert (matches.sum(0) == 1).all()
        chosen[share] = matches.float().mean(1)
    assert chosen[0.0].tolist() == [0, 0, 1]
    assert (chosen[0.5] - torch.tensor([0.25, 0.25, 0.5])).abs().max() < 0.08


def test_gradients_reach_encoder_and_convolutions_of_the_scales():
    torch.manual_seed(0)
    task = task_of(VARVQModel(**RECIPE["model"]))
    encoded = torch.randn(2, 4, 4, 4, requires_grad=True)
    latents, commitment = task.quantise(1, encoded)
    (latents.pow(2).sum() + commitment).backward()
    assert encoded.grad.abs().min() > 0
    used = sorted(set(task.model.phi_index))
    assert [k for k, phi in enumerate(task.model.phi) if phi.weight.grad is not None] == used


def test_the_recipe_in_the_documentation_is_complete():
    documentation = Path(__file__).parents[2] / "docs" / "training.md"
    tables = [tomllib.loads(part.split("```")[0]) for part in documentation.read_text().split("```toml\n")[1:]]
    recipe = next(table for table in tables if "tokenizer" in table)
    recipe = check(TokenizerRecipe, recipe, "the page")
    new_tokenizer(recipe)
    take_over(VARVQModel(**recipe.model), recipe.start_from)


# Starting from another tokenizer


@pytest.fixture(scope="module")
def llamagen():
    torch.manual_seed(5)
    return LlamaGenVQModel(**WIDTHS, latent_channels=6, codebook_size=16, codebook_dim=2)


@pytest.mark.parametrize("pipeline_folder", [True, False])
def test_weights_of_the_same_shape_are_taken_over(llamagen, tmp_path, pipeline_folder):
    llamagen.save_pretrained(tmp_path / "vq")
    torch.manual_seed(6)
    model = VARVQModel(**RECIPE["model"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    take_over(model, tmp_path if pipeline_folder else tmp_path / "vq")
    after, theirs = model.state_dict(), llamagen.state_dict()
    taken = {name for name, value in after.items() if name in theirs and torch.equal(value, theirs[name])}
    assert {name for name in after if not torch.equal(before[name], after[name])} <= taken
    missing = {name for name in after if name.startswith(("encoder.", "decoder."))} - taken
    assert missing == {"encoder.conv_out.weight", "encoder.conv_out.bias", "decoder.conv_in.weight"}


def test_a_tokenizer_of_the_same_class_is_taken_over_whole(tmp_path):
    theirs = VARVQModel(**RECIPE["model"])
    theirs.save_pretrained(tmp_path)
    model = VARVQModel(**RECIPE["model"])
    take_over(model, tmp_path)
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in model.state_dict().items())


def test_what_cannot_be_started_from_is_refused(llamagen, tmp_path):
    model = VARVQModel(**RECIPE["model"])
    with pytest.raises(ValueError, match="nonesuch is not a tokenizer"):
        take_over(model, "nonesuch")
    with pytest.raises(ValueError, match=r"emoji-arpg has channels=16, not 8: start from .* the same widths"):
        take_over(model, "emoji-arpg")
    llamagen.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"_class_name": "AutoencoderKL"}))
    with pytest.raises(ValueError, match="holds a AutoencoderKL: start from one of LlamaGenVQModel, VARVQModel"):
        take_over(model, tmp_path)


# What a user may get wrong


def test_scales_that_do_not_fit_the_images_are_refused(folder, tmp_path):
    recipe = copy.deepcopy(RECIPE)
    recipe["model"]["scales"] = [1, 2, 5]
    with pytest.raises(
        ValueError, match="images of 16 pixels do not fit scales up to 5 at 4 pixels per cell: .* with 4"
    ):
        run(folder, tmp_path, recipe)
