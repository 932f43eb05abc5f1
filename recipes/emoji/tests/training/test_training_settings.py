"""A training is resumed with the settings, data and networks that it began with, or refused in one sentence."""

import itertools
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch

from arimage.tokenizers.vq_frames import FramewiseVQModel
from arimage.training.loop import OptimizerSettings
from arimage_emoji.data.classifier import ClassifierSettings, train_classifier
from arimage_emoji.training.beginning import Beginning, Run
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.recipe import load_recipe, run_transformer, task_of
from arimage_emoji.training.tables import read_tables


OPTIMIZER = {"steps": 2, "learning_rate": 1e-3, "warmup_steps": 1}
CAPTIONS = {"batch_size": 2, "caption_length": 6, "text_vocab_size": 300}
TEXT = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.0}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_attention_heads": 2}
VAR = {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2}
WIDTHS = {"channels": 8, "channel_multipliers": [1, 2], "layers_per_block": 1, "norm_num_groups": 4}
LATENT = {**LLAMA, "head_hidden_size": 16, "num_head_layers": 1}
VIDEO = {**LLAMA, "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 100.0}


def frames_tokenizer(seed):
    frames = FramewiseVQModel(**WIDTHS, codebook_size=8, codebook_dim=4, latent_channels=8)
    return tiny.randomise(frames, seed)


# Of each kind: its image tokenizer, the class of that in a recipe, other tables, and those of the transformer.
KINDS = {
    "llamagen": (tiny.image_tokenizer, "LlamaGenVQModel", {}, {"model": LLAMA}),
    "var": (tiny.scale_tokenizer, "VARVQModel", {"refiner": {"model": VAR, "optimizer": OPTIMIZER}}, {"model": VAR}),
    "cosmos": (frames_tokenizer, "LlamaGenVQModel", {"clips": {"frames": 2}}, {"model": VIDEO}),
    "latent llama": (
        tiny.image_tokenizer,
        "LlamaGenVQModel",
        {"generation": {"decoding": {"name": "ar"}, "sampling": {"num_diffusion_steps": 2}}},
        {"class": "LatentLlamaTransformer", "model": LATENT, "drafter": LATENT, "training": {"drafter_steps": 2}},
    ),
}


def pictures(seed, size=8, frames=(), count=4):
    generator = torch.Generator().manual_seed(seed)
    names = [f"a {colour} {shape}" for colour, shape in itertools.product(("red", "green"), ("heart", "tree"))]
    return ImageCaptions(
        images=torch.randint(256, (count, *frames, 3, size, size), generator=generator, dtype=torch.uint8),
        alpha=torch.full((count, *frames, 1, size, size), 255, dtype=torch.uint8),
        captions=[[name] for name in names],
        names=names,
        bases=names,
        weights=torch.ones(count),
    )


@dataclass
class Asked:
    """What a command asks for: settings, and seeds of the data and of the networks."""

    out: Path
    settings: dict
    data: int = 0
    heldout: int = 1
    base: int = 0

    def sets(self, **shape):
        return pictures(self.data, **shape), pictures(self.heldout, **shape)


def train(kind, asked):
    settings = CAPTIONS | asked.settings
    optimizer = OPTIMIZER | {name: settings.pop(name) for name in ("learning_rate", "steps") if name in settings}
    if kind == "classifier":
        settings = ClassifierSettings(OptimizerSettings(**optimizer), batch_size=settings["batch_size"])
        train_classifier(*asked.sets(size=32), asked.out / "run", settings=settings)
        return
    tokenizer, name, tables, transformer = KINDS[kind]
    tokenizer(seed=asked.base).save_pretrained(asked.out / f"tokenizer {asked.base}")
    more = {"optimizer": optimizer, "training": transformer.get("training", {}) | settings}
    recipe = {"image_size": 8, "tokenizer": {"class": name, "model": {}}, "text_encoder": TEXT}
    recipe |= {"generation": {"decoding": {"name": "ar"}}, "transformer": transformer | more, **tables}
    tables, sets = read_tables(recipe), asked.sets(frames=(2,) if kind == "cosmos" else ())
    parts = tables, asked.out / f"tokenizer {asked.base}", *sets, asked.out / "run", "cpu"
    task_of(tables).run(Run(*parts, lambda pipe: None, Beginning()))


# What changes, and the names that the sentence has for it. Not every trainer has all of them.
CHANGES = {
    "learning_rate": ({"settings": {"learning_rate": 2e-3}}, "learning_rate = 0.001 and you ask for 0.002"),
    "batch_size": ({"settings": {"batch_size": 3}}, "batch_size = . and you ask for 3"),
    "data": ({"data": 2}, "(data.images|prompts) = '"),
    "heldout": ({"heldout": 2}, "(heldout|prior).images = '"),
    "base": ({"base": 1}, r"(model\.[a-z_]+|vq|start_from[a-z_.]*|text_encoder|network|teacher) = "),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", [*KINDS, "classifier"])
def test_every_training_resumes_only_as_it_began(kind, tmp_path):
    train(kind, Asked(tmp_path, {}))
    for name, (change, message) in CHANGES.items():
        if (kind, name) == ("classifier", "base"):
            continue
        with pytest.raises(ValueError, match=f"(settings.json|safetensors) says [a-z._]*{message}.*another --out"):
            train(kind, Asked(tmp_path, **{"settings": {}, **change}))
    # What was refused has changed nothing. A drafter and a refiner belong to networks that are trained further.
    for part in ("drafter", "refiner"):
        shutil.rmtree(tmp_path / "run" / part, ignore_errors=True)
    train(kind, Asked(tmp_path, {"steps": 3}))
    assert 3 in {torch.load(path, weights_only=True)["step"] for path in tmp_path.glob("run/**/checkpoint.pt")}


def test_a_model_that_the_run_replaces_is_not_one_to_start_from(tmp_path):
    (tmp_path / "tokenizer" / "tokenizer").mkdir(parents=True)
    with pytest.raises(ValueError, match="--start-from"):
        run_transformer(
            load_recipe("emoji-llamagen"), "x", "x", tmp_path, "cpu", start_from=tmp_path / "x" / ".." / "model"
        )
