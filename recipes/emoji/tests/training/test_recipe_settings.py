"""Every wrong value of every setting of the packaged recipes is refused in one sentence, before anything is
trained."""

import copy
import json
import sys
import tomllib
from types import SimpleNamespace

import pytest

from arimage.training import recipe as recipes
from arimage_emoji import RECIPES, commands
from arimage_emoji.training.recipe import load_recipe


def toml(value):
    """A value in TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {toml(one)}" for name, one in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value) if isinstance(value, bool | str) else repr(value)


def write(recipe, path):
    path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in recipe.items()))
    return path


def changed(recipe, place, value):
    recipe = copy.deepcopy(recipe)
    table = recipe
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    return recipe


@pytest.mark.every(6)
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("image_size",), 18, "image_size is 18, .*: give a multiple of 4"),
        (("image_size",), 10**6, "image_size is 1000000: give at most 2048"),
        (("transformer", "optimizer", "betas"), [0.9], r"transformer.optimizer.betas\[1\] is missing: add it"),
        (("transformer", "optimizer", "betas"), [0.9, 1.0], r"betas\[1\] is 1.0: give less than 1"),
        (("transformer", "optimizer", "restarts"), [[5]], r"restarts\[0\]\[1\] is missing"),
        (
            ("transformer", "optimizer", "restarts"),
            [[5, 1.0], [5, 1.0]],
            "restarts begin at .*: give them in ascending",
        ),
        (
            ("transformer", "scenes", "pair_share"),
            0.9,
            "shares of the made pictures are 1.07 together: give at most 1",
        ),
        (("transformer", "training", "optimizer"), {}, "optimizer is not a setting: leave it out"),
        (("transformer", "training", "sampling"), {}, "sampling is not a setting: leave it out"),
        (("transformer", "training", "stages"), [{}], r"stages\[0\].start: it is None: give a whole number"),
        (("transformer", "training", "stages"), [{"start": 1, "stages": []}], r"stages\[0\].stages cannot change"),
        (
            ("transformer", "training", "stages"),
            [{"start": 1, "batch_size": 0}],
            r"stages\[0\]: batch_size is 0: give",
        ),
        (("transformer", "training", "stages"), [{"start": 1, "x": 0}], r"stages\[0\]: x is not a setting"),
        (
            ("transformer", "model", "vocab_size"),
            5,
            r"\[transformer.model\]: vocab_size is not a setting: leave it out",
        ),
        (("transformer", "model", "num_attention_heads"), 3, "heads"),
        (("transformer", "model", "intermediate_size"), 2**17, "the weights take . GB, and this machine has 0: give"),
        (
            ("transformer", "class"),
            "VARTransformer",
            "transformer.class is 'VARTransformer': give 'LlamaGenTransformer', ",
        ),
        (("tokenizer", "class"), "VARVQModel", r"table \[model\]: latent_channels is not a setting"),
        (("tokenizer", "model", "norm_num_groups"), 3, "norm_num_groups is 3: give a number that divides"),
        (
            ("tokenizer", "model", "codebook_size"),
            10**5,
            "65536 tokens|cannot start 100000 codes: raise kmeans_batches",
        ),
        (("tokenizer", "training", "codebook_start"), 1600, "codebook_start is 1600: give less than the 1600 steps"),
        (("generation", "sampling", "temprature"), 1.0, "temprature is not a setting"),
        (("generation", "sampling", "order"), "raster", "order is not a setting of a LlamaGenPipeline"),
        (("generation", "sampling", "num_diffusion_steps"), 25, "num_diffusion_steps is not a setting"),
        (("generation", "sampling", "decoding"), {}, "decoding is not a setting: add a table"),
        (("generation", "decoding", "window"), 0, "window is 0"),
        (("generation", "decoding", "windows"), 5, "windows"),
        (("generation", "decoding"), {"name": "next-scale"}, "name is next-scale, which does not fit the model: "),
        (("generation", "decoding"), {"name": "eagle"}, "name is eagle, which does not fit the model: "),
    ],
)
def test_settings_that_do_not_fit_are_refused(place, value, message, tmp_path, monkeypatch):
    if place[-1] == "intermediate_size":
        monkeypatch.setattr(recipes.psutil, "virtual_memory", lambda: SimpleNamespace(total=10**8))
    recipe = changed(tomllib.loads((RECIPES / "emoji-llamagen.toml").read_text()), place, value)
    with pytest.raises(ValueError, match=f"^.*mine.toml: [^\n]*({message})[^\n]*$"):
        load_recipe(write(recipe, tmp_path / "mine.toml"))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("emoji-var", ("transformer", "training", "scale_shares"), [0, 1], "has 2 numbers: give one per scale"),
        ("emoji-var", ("refiner", "training", "scale_shares"), [0] * 6, "give a number above 0"),
        ("emoji-var", ("refiner", "training", "first_scale"), 6, "give a number above 0|first_scale is 6"),
        ("emoji-var", ("tokenizer", "model", "scales"), [1, 2, 5], "end the scales with 16"),
        ("emoji-var", ("transformer", "class"), "ARPGTransformer", "class is ARPGTransformer, and .*: leave it out"),
        (
            "emoji-video-blocks",
            ("transformer", "class"),
            "ARPGTransformer",
            "class is ARPGTransformer, and .*: leave it out",
        ),
        ("emoji-arpg", ("transformer", "training", "raster_share"), 0.5, "more than 1 together"),
        ("emoji-latent-llama", ("transformer", "training", "drafter_steps"), 0, "drafter_steps is 0: give at least 1"),
        (
            "emoji-latent-llama",
            ("transformer", "model", "patch_size"),
            3,
            "patch_size is 3: give a number that divides",
        ),
    ],
)
def test_settings_of_a_kind_that_do_not_fit_are_refused(name, place, value, message, tmp_path):
    recipe = changed(tomllib.loads((RECIPES / f"{name}.toml").read_text()), place, value)
    with pytest.raises(ValueError, match=f"^.*mine.toml: [^\n]*({message})[^\n]*$"):
        load_recipe(write(recipe, tmp_path / "mine.toml"))


def test_the_command_refuses_a_wrong_setting_before_any_work(tmp_path, monkeypatch, capsys):
    recipe = tomllib.loads((RECIPES / "emoji-llamagen.toml").read_text())
    path = write(changed(recipe, ("transformer", "optimizer", "warmup_steps"), 0), tmp_path / "mine.toml")
    words = ["--recipe", path, "--data", tmp_path, "--heldout", tmp_path, "--out", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["arimage-emoji", "train", "tokenizer", *map(str, words)])
    with pytest.raises(SystemExit, match="2"):
        commands.run()
    message = capsys.readouterr().err
    assert message == f"arimage: {path}: transformer.optimizer.warmup_steps is 0: give at least 1\n"
    assert not (tmp_path / "run").exists()
