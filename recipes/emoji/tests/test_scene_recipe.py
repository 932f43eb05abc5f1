"""The recipe with scenes fits the package, and one command runs it on a small version."""

import copy
import sys

import numpy as np
import pytest
import torch

from arimage import AutoPipeline
from arimage.training import loop
from arimage.training.data.row import SEPARATOR
from arimage.training.data.sources import open_source
from arimage.training.pixels import open_pixels
from arimage.training.tokenizers import tokenizer
from arimage_emoji import commands
from arimage_emoji.training import recipe
from arimage_emoji.training.captioned import write_pictures
from arimage_emoji.training.tables import load_data, read_tables, with_scenes


NAME = "emoji-llamagen"
RGB = {"tomato": (215, 30, 30), "lime": (60, 170, 50), "bell": (250, 205, 40), "owl": (120, 120, 120)}


@pytest.fixture(scope="module")
def data(tmp_path_factory, write_pictures):
    """Four discs."""
    y, x = np.mgrid[:64, :64] - 31.5
    inside = x**2 + y**2 < 700
    rows = []
    for name, rgb in RGB.items():
        picture = np.full((64, 64, 3), 255, np.uint8)
        picture[inside] = rgb
        texts = {"caption": f"{name}, noto style", "captions": [f"a {name}"], "keywords": [f"{name} word"]}
        rows.append({"image": picture, "alpha": inside, "name": name, **texts})
    return write_pictures(tmp_path_factory.mktemp("data") / "discs.parquet", rows)


@pytest.fixture
def tiny(monkeypatch):
    """The recipe with everything small."""
    small = copy.deepcopy(recipe.load_recipe(NAME))
    small["image_size"] = 32
    for part in ("tokenizer", "transformer"):
        small[part]["scenes"] |= {"pairs": 12}
        small[part]["optimizer"] |= {"steps": 6, "warmup_steps": 2}
        small[part]["training"]["batch_size"] = 4
    small["tokenizer"]["model"] |= {"channels": 8, "latent_channels": 8, "codebook_size": 16, "codebook_dim": 4}
    small["tokenizer"]["training"] |= {"codebook_start": 2, "kmeans_batches": 1}
    small["transformer"]["model"] |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 1,
        "num_attention_heads": 2,
    }
    small["transformer"]["training"] |= {"text_vocab_size": 400, "short_tokens": 16, "sample_prompts": ["a lime"]}
    small["text_training"]["optimizer"] |= {"steps": 6, "warmup_steps": 2}
    small["text_encoder"] |= {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1}
    small["generation"]["sampling"]["top_k"] = 10
    monkeypatch.setattr(recipe, "load_recipe", lambda name, *parts: small)
    monkeypatch.setattr(loop, "plot_log", lambda log, path: None)
    return small


@pytest.mark.slow
def test_one_command_trains_a_model_that_generates(tiny, data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    options = {"--recipe": NAME, "--data": data, "--heldout": data, "--out": out, "--device": "cpu"}
    words = [str(word) for pair in options.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["arimage-emoji", "train", "all", *words])
    try:
        commands.run()
    except SystemExit as end:
        assert not end.code
    pipe = AutoPipeline.from_pretrained(out / "model", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    # The words of made captions are whole tokens.
    assert len(pipe.tokenizer("two owls").input_ids) <= 4
    assert pipe.generation_config["guidance_scale"] == tiny["generation"]["sampling"]["guidance_scale"]
    assert list(pipe.known_captions.pictures) == list(RGB) and pipe.known_captions.knows("two owls")
    assert pipe("a blue lime", generator=torch.Generator().manual_seed(0)).images[0].size == (32, 32)


def test_images_come_first_and_keep_their_keywords(tiny, data):
    plain = load_data(read_tables(tiny), "transformer", data)
    whole = with_scenes(read_tables(tiny), "transformer", plain)
    assert len(plain) == 4 and len(whole) > 40
    assert plain.keywords == [[f"{name} word"] for name in RGB]
    assert torch.equal(whole.images[:4], plain.images)
    assert "tomato word" in whole.captions[0]


def test_scenes_are_for_training_only(tiny, data, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        tokenizer, "train_tokenizer", lambda model, *sets, **more: seen.append([len(one) for one in sets[:2]])
    )
    recipe.run_tokenizer(tiny, data, data, tmp_path, "cpu")
    assert seen[0][0] > 40 and seen[0][1] == 4


def test_pictures_become_an_ordinary_data_set(tiny, data, tmp_path):
    found = with_scenes(read_tables(tiny), "transformer", load_data(read_tables(tiny), "transformer", data))
    write_pictures(found, tmp_path / "pictures.parquet")
    source = open_source(str(tmp_path / "pictures.parquet"), caption="captions")
    rows = list(source.read())
    assert [text.split(SEPARATOR) for _, _, text in rows] == found.captions
    images, alpha = open_pixels(tmp_path / "pictures.parquet", found.size, workers=0).read(range(len(found)))
    assert torch.equal(alpha, found.alpha)
    # Where little of a picture covers white, 8 bits do not hold its colour.
    assert (images.int() - found.images.int()).abs().max() <= 1
