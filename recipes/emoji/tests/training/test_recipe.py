"""Recipes that do not fit are refused before any work, and the reports follow them."""

import sys
from types import SimpleNamespace

import pytest
import torch
from pipelines.var import tiny as tiny_var

from arimage.training.loop import OptimizerSettings
from arimage.training.tokenizers.tokenizer import TokenizerSettings
from arimage_emoji import commands
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.captions import CaptionSettings, CaptionTask
from arimage_emoji.training.tables import TrainingTable, settings_of
from arimage_emoji.training.transformers.var import VARTransformerSettings, VARTransformerTask


COMMANDS = ["tokenizer", "transformer", "all"]


@pytest.mark.every(4)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "contents", ["", "[unknown]\nx = 1", "image_size = 'x'", "image_size = 8\ntokenizer = 5", "="]
)
def test_a_recipe_without_its_parts_is_refused_before_any_work(monkeypatch, capsys, tmp_path, command, contents):
    (tmp_path / "mine.toml").write_text(contents)
    options = {"--recipe": tmp_path / "mine.toml", "--data": "x", "--heldout": "x", "--out": tmp_path / "run"}
    words = [str(word) for pair in options.items() for word in pair]
    monkeypatch.setattr(sys, "argv", ["arimage-emoji", "train", command, *words])
    with pytest.raises(SystemExit, match="2"):
        commands.run()
    error = capsys.readouterr().err
    assert "mine.toml" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "training", [{"nonesuch": 1}, {"optimizer": {"steps": 1, "learning_rate": 1.0}}, {"codebook_start": -5}]
)
def test_settings_that_a_table_cannot_have_are_refused(training):
    table = TrainingTable(optimizer=OptimizerSettings(5, 1.0), training=training)
    with pytest.raises(
        ValueError, match=rf"^table \[tokenizer.training\]: {next(iter(training))} is .*: (leave|give)"
    ):
        settings_of(TokenizerSettings, table, "tokenizer")


def test_samples_follow_the_recipe(tmp_path):
    asked = {}

    class Pipe:
        def set_progress_bar_config(self, **options):
            pass

        def __call__(self, prompts, **arguments):
            asked.update(arguments, prompts=prompts)
            return SimpleNamespace(images=torch.zeros(len(prompts), 3, 4, 4))

    settings = CaptionSettings(OptimizerSettings(1, 1.0), sample_prompts=("a", "b"), sampling={"top_k": 7})
    task = SimpleNamespace(frozen=SimpleNamespace(pipe=Pipe()), settings=settings, decoding="ar")
    CaptionTask.save_samples(task, tmp_path / "samples.png")
    assert asked["prompts"] == ["a", "b"] and asked["top_k"] == 7 and asked["decoding"] == "ar"
    assert {"guidance_scale", "temperature"}.isdisjoint(asked)


def test_what_is_frozen_is_neither_trained_nor_kept():
    pipe = tiny_var.pipeline("text")
    size = pipe.vq.config.scales[-1] * pipe.vq.scale_factor
    images = torch.zeros(2, 3, size, size, dtype=torch.uint8)
    data = ImageCaptions(images, images[:, :1], [["a red heart"]] * 2, ["heart"] * 2, ["2764"] * 2, torch.ones(2))
    settings = VARTransformerSettings(OptimizerSettings(1, 1.0))
    task = VARTransformerTask(pipe, data, data, settings, teacher=pipe.refiner)
    assert task.frozen.teacher is pipe.refiner and task.frozen.pipe is pipe
    assert {name.partition(".")[0] for name, _ in task.named_parameters()} == {"network", "text_encoder"}
    assert {name for name, _ in task.named_children()} == {"network", "text_encoder"}
