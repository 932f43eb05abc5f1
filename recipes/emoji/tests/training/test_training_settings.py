"""A training is resumed with the settings, data and networks that it began with, or refused in one sentence."""

import itertools
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import tiny
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.tokenizers.vq_frames import FramewiseVQModel
from arimage.training.loop import OptimizerSettings
from arimage_emoji.data.classifier import ClassifierSettings, train_classifier
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.recipe import load_recipe, run_transformer
from arimage_emoji.training.transformers.cosmos import VideoSettings, train_cosmos_transformer
from arimage_emoji.training.transformers.latent_llama import LatentLlamaSettings, train_latent_llama
from arimage_emoji.training.transformers.llamagen import TransformerSettings, train_transformer
from arimage_emoji.training.transformers.var import VARTransformerSettings, train_var_transformer


OPTIMIZER = OptimizerSettings(steps=2, learning_rate=1e-3, warmup_steps=1)
CAPTIONS = {"batch_size": 2, "caption_length": 6, "text_vocab_size": 300}
TEXT = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, "num_layers": 1, "dropout_rate": 0.0}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_attention_heads": 2}
VAR = {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2}
WIDTHS = {"channels": 8, "channel_multipliers": [1, 2], "layers_per_block": 1, "norm_num_groups": 4}
LATENT = {**LLAMA, "head_hidden_size": 16, "num_head_layers": 1}


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

    def of(self, kind, **common):
        optimizer = {name: self.settings[name] for name in ("learning_rate", "steps") if name in self.settings}
        others = {name: value for name, value in self.settings.items() if name not in optimizer}
        return kind(replace(OPTIMIZER, **optimizer), **{**common, **others})

    def sets(self, **shape):
        return pictures(self.data, **shape), pictures(self.heldout, **shape)

    @property
    def pipe(self):
        return tiny_llamagen.text_pipeline(seed=self.base)


def transformer(asked):
    vq = tiny.image_tokenizer(seed=asked.base)
    settings = asked.of(TransformerSettings, **CAPTIONS)
    train_transformer(LLAMA, TEXT, vq, *asked.sets(), settings, asked.out / "run")


def var(asked):
    parts = VAR, TEXT, tiny.scale_tokenizer(seed=asked.base), *asked.sets()
    train_var_transformer(*parts, asked.of(VARTransformerSettings, **CAPTIONS), asked.out / "run")


def cosmos(asked):
    frames = FramewiseVQModel(**WIDTHS, codebook_size=8, codebook_dim=4, latent_channels=8)
    tiny.randomise(frames, asked.base)
    model = {**LLAMA, "num_key_value_heads": 2, "head_dim": 24, "rope_theta": 100.0}
    parts = model, TEXT, frames, *asked.sets(frames=(2,)), asked.of(VideoSettings, **CAPTIONS)
    train_cosmos_transformer(*parts, asked.out / "run")


def latent_llama(asked):
    settings = asked.of(LatentLlamaSettings, **CAPTIONS, drafter_steps=2, sampling={"num_diffusion_steps": 2})
    parts = LATENT, LATENT, TEXT, tiny.image_tokenizer(seed=asked.base), *asked.sets(), settings
    train_latent_llama(*parts, asked.out / "run")


def classifier(asked):
    train_classifier(*asked.sets(size=32), asked.out / "run", settings=asked.of(ClassifierSettings, batch_size=2))


TRAINERS = [transformer, var, cosmos, latent_llama, classifier]
# What changes, and the names that the sentence has for it. Not every trainer has all of them.
CHANGES = {
    "learning_rate": ({"settings": {"learning_rate": 2e-3}}, "learning_rate = 0.001 and you ask for 0.002"),
    "batch_size": ({"settings": {"batch_size": 3}}, "batch_size = . and you ask for 3"),
    "data": ({"data": 2}, "(data.images|prompts) = '"),
    "heldout": ({"heldout": 2}, "(heldout|prior).images = '"),
    "base": ({"base": 1}, r"(model\.[a-z_]+|vq|start_from[a-z_.]*|text_encoder|network|teacher) = "),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("trainer", TRAINERS, ids=lambda trainer: trainer.__name__)
def test_every_training_resumes_only_as_it_began(trainer, tmp_path):
    trainer(Asked(tmp_path, {}))
    for name, (change, message) in CHANGES.items():
        if (trainer, name) == (classifier, "base"):
            continue
        with pytest.raises(ValueError, match=f"(settings.json|safetensors) says [a-z._]*{message}.*another --out"):
            trainer(Asked(tmp_path, **{"settings": {}, **change}))
    # What was refused has changed nothing. A drafter belongs to a text encoder that is trained further.
    shutil.rmtree(tmp_path / "run" / "drafter" if trainer is latent_llama else tmp_path / "none", ignore_errors=True)
    trainer(Asked(tmp_path, {"steps": 3}))
    assert 3 in {torch.load(path, weights_only=True)["step"] for path in tmp_path.glob("run/**/checkpoint.pt")}


def test_a_model_that_the_run_replaces_is_not_one_to_start_from(tmp_path):
    (tmp_path / "tokenizer" / "tokenizer").mkdir(parents=True)
    with pytest.raises(ValueError, match="--start-from"):
        run_transformer(
            load_recipe("emoji-llamagen"), "x", "x", tmp_path, "cpu", start_from=tmp_path / "x" / ".." / "model"
        )
