"""Every wrong value of every setting of the packaged recipes is refused in one sentence, before anything is
trained."""

import copy
import json
import math
import sys
import tomllib
from dataclasses import fields
from types import SimpleNamespace

import pytest
from torch import nn

from arimage.training import recipe as recipes
from arimage.training.loop import OptimizerSettings
from arimage.training.recipe import TextEncoderTable
from arimage.training.tokenizers.tokenizer import TokenizerSettings
from arimage_emoji import RECIPES, commands
from arimage_emoji.data.animation import ClipSettings
from arimage_emoji.data.scenes import SceneSettings
from arimage_emoji.training.recipe import load_recipe, whole_recipes
from arimage_emoji.training.tables import DataTable
from arimage_emoji.training.text import TextSettings
from arimage_emoji.training.transformers.arpg import ARPGSettings
from arimage_emoji.training.transformers.cosmos import VideoSettings
from arimage_emoji.training.transformers.latent_llama import LatentLlamaSettings
from arimage_emoji.training.transformers.llamagen import TransformerSettings
from arimage_emoji.training.transformers.var import VARTransformerSettings


# By name, what the settings of a transformer may be.
KINDS = {
    "emoji-llamagen": TransformerSettings,
    "emoji-arpg": ARPGSettings,
    "emoji-latent-llama": LatentLlamaSettings,
    "emoji-var": VARTransformerSettings,
    "emoji-video-blocks": VideoSettings,
}
# By the names of the last tables, the settings that these may have besides those in the packaged recipes.
OTHERS = {
    ("optimizer",): OptimizerSettings,
    ("scenes",): SceneSettings,
    ("clips",): ClipSettings,
    ("tokenizer", "training"): TokenizerSettings,
    ("text_training", "training"): TextSettings,
}
WRONG = [True, "x", 0, -1, math.nan, math.inf, 10**30, [], [0.9], {}]
# Where a value is legal, by the name of the setting.
SHARES = {
    "ground_share", "recoloured_share", "counted_share", "pair_share", "weight_decay", "ema_decay", "primary_share",
    "framed_share", "mixed_share", "caption_dropout", "code_noise", "noisy_share", "most_noise", "short_share",
    "raster_share", "farthest_share", "text_learning_rate_scale", "input_noise", "token_power", "law_weight",
    "codebook_decay", "commitment", "dead_code_count", "restart_until", "partial_share", "pure_share", "first_share",
    "vector_weight", "feature_noise", "dropout_rate", "guidance_scale", "dropout", "final_share",
}  # fmt: skip
LEGAL = {
    "0": SHARES | {
        "grounds", "pairs", "seed", "top_k", "start", "max_shift", "codebook_start", "samples_per_image",
        "first_scale", "num_condition_tokens", "num_phi", "drafter_steps", "adversarial_start", "shrunk_share",
        "adversarial", "permuted_share", "first_places",
    },
    "True": {
        "skin_tones", "counted", "train_text", "fine_tune", "place_embeddings", "shared_adaln", "reads_words",
        "weighted",
    },
    "[]": {"restarts", "muon", "stages"},
    "{}": {"data", "scenes", "training", "sampling", "model", "clips", "text_encoder"},
    "'x'": {"start_from", "flags"},
}  # fmt: skip


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


def settings(name, value, path=()):
    """The places of all settings and tables, with their values."""
    if path:
        yield path, value
    if isinstance(value, dict):
        inside = dict(value)
        others = OTHERS.get(path[-1:]) or OTHERS.get(path[-2:])
        if path == ("transformer", "training"):
            others = KINDS[name]
        for field in () if others is None else fields(others):
            if field.name not in ("optimizer", "sampling"):
                inside.setdefault(field.name, None)
        if path[-1:] in (("data",), ("text_encoder",)):
            table = DataTable if path[-1] == "data" else TextEncoderTable
            inside = dict.fromkeys(table.model_fields) | inside
        for key, one in inside.items():
            yield from settings(name, one, (*path, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        # The others are like the first.
        yield from settings(name, value[0], (*path, 0))


def cases():
    """Every setting of the recipes; where several recipes read it alike, once, and quick in the first of the tables
    that are read alike."""
    seen, quick = set(), set()
    for path in whole_recipes().values():
        recipe = tomllib.loads(path.read_text())
        for place, _ in settings(path.stem, recipe):
            reader = recipe["tokenizer"].get("class")
            if place[0] == "transformer":
                # The settings of captions are those of all kinds.
                kinds = [
                    kind for kind in KINDS[path.stem].__mro__ if place[-1] in vars(kind).get("__annotations__", ())
                ]
                reader = kinds[0] if kinds and "training" in place else KINDS[path.stem]
            if (place, reader) not in seen:
                seen.add((place, reader))
                # The optimizers, data and scenes of all parts are tables of one kind.
                alike = place[-2:] if place[-2:-1] in (("optimizer",), ("data",), ("scenes",)) else (place, reader)
                marks = pytest.mark.slow if alike in quick else ()
                quick.add(alike)
                # Two of the values; those that one setting leaves out are tried with the next ones.
                first = WRONG[len(seen) % 5 :: 5]
                for values in (first, [value for value in WRONG if value not in first]):
                    yield pytest.param(
                        path.stem, place, values, marks=marks, id=f"{path.stem}: {'.'.join(map(str, place))}"
                    )
                    marks = pytest.mark.slow


def changed(recipe, place, value):
    recipe = copy.deepcopy(recipe)
    table = recipe
    for key in place[:-1]:
        table = table[key]
    table[place[-1]] = value
    return recipe


@pytest.fixture
def no_start(monkeypatch):
    """Models without memory, whose weights have no values to start from, are built sooner."""
    for kind in (nn.Linear, nn.modules.conv._ConvNd):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: None)


@pytest.mark.every(8)
@pytest.mark.usefixtures("no_start")
@pytest.mark.parametrize(("name", "place", "values"), list(cases()))
def test_wrong_values_are_refused_in_one_sentence(name, place, values, tmp_path):
    recipe = tomllib.loads((RECIPES / f"{name}.toml").read_text())
    recipe.get("transformer", {}).get("model", {})["num_layers"] = 2
    recipe.get("tokenizer", {}).get("model", {})["layers_per_block"] = 1
    setting = [key for key in place if isinstance(key, str)][-1]
    for value in values:
        path = write(changed(recipe, place, value), tmp_path / "mine.toml")
        try:
            load_recipe(path)
        except ValueError as error:
            message = str(error)
            assert message.startswith(f"{path}: ") and "\n" not in message
            assert any(
                word in message
                for word in ("give", "leave", "add", "raise", "end", "must", "change", "available", "load")
            )
            assert setting in message or value == {} or place[:2] == ("generation", "decoding")
        else:
            assert setting in LEGAL.get(repr(value), ()), f"{value!r} was accepted"


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
        (("tokenizer", "class"), "VARVQModel", r"table \[tokenizer.model\]: latent_channels is not a setting"),
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
