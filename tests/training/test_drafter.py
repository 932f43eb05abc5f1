"""A drafter learns to continue its transformer, goes on after an interruption, and leaves the rest as it was."""

import itertools

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline
from arimage.training.acceleration import drafter as drafter_module
from arimage.training.acceleration.drafter import DrafterSettings, train_drafter
from arimage.training.loop import OptimizerSettings
from arimage_emoji import RECIPES
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.recipe import load_recipe


SETTINGS = DrafterSettings(
    OptimizerSettings(steps=24, learning_rate=1e-2, warmup_steps=4, gradient_clip=0.5, ema_decay=0.8), batch_size=4
)


def pictures(count, seed):
    generator = torch.Generator().manual_seed(seed)
    captions = [f"a {colour} {shape}" for colour, shape in itertools.product(("red", "green"), ("heart", "tree"))]
    return ImageCaptions(
        images=torch.randint(256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8),
        alpha=torch.full((count, 1, 8, 8), 255, dtype=torch.uint8),
        captions=[[captions[i % 4], "another caption"] for i in range(count)],
        names=["name"] * count,
        bases=["base"] * count,
        weights=torch.ones(count),
    )


def train(out, on_report=None):
    pipe = tiny_llamagen.text_pipeline()
    pipe.register_modules(drafter=None)
    return train_drafter(pipe, pictures(6, 0), pictures(3, 1), SETTINGS, out, on_report)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        losses, loss = [], drafter_module.DrafterTask.loss
        monkeypatch.setattr(
            drafter_module.DrafterTask, "loss", lambda self, step: losses.append(loss(self, step)) or losses[-1]
        )
        pipe = train(tmp_path_factory.mktemp("run"))
    return pipe, [{name: float(value) for name, value in figures.items()} for _, figures in losses]


def test_the_losses_fall_and_the_laws_come_closer(trained):
    _, figures = trained
    first, last = (
        {name: sum(row[name] for row in rows) / 4 for name in rows[0]} for rows in (figures[:4], figures[-4:])
    )
    assert (
        last["feature loss"] < 0.9 * first["feature loss"]
        and last["distribution loss"] < 0.9 * first["distribution loss"]
    )
    assert last["overlap"] > first["overlap"]


def test_only_the_drafter_is_trained(trained):
    pipe, before = trained[0], tiny_llamagen.text_pipeline()
    for name, module in before.components.items():
        if isinstance(module, torch.nn.Module) and name != "drafter":
            for key, value in module.state_dict().items():
                assert torch.equal(getattr(pipe, name).state_dict()[key], value), f"{name} {key}"


def test_the_command_saves_the_model_with_its_drafter(tmp_path, monkeypatch):
    monkeypatch.setattr(drafter_module, "load_both", lambda recipe, part, *paths: (pictures(4, 0), pictures(4, 0)))
    part = {"optimizer": {"steps": 2, "learning_rate": 1e-3}, "training": {"samples_per_image": 0}}
    drafter_module.run_drafter(
        {"image_size": 8, "drafter": part}, tiny_llamagen.text_pipeline(), "train", "heldout", tmp_path
    )
    pipe = AutoPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    stats = pipe("a red heart", decoding="eagle", output_type="latent").stats
    assert stats.exact and stats.forward_passes <= 16


@pytest.mark.parametrize("at", [pytest.param(3, marks=pytest.mark.slow), 17])
def test_an_interrupted_run_ends_as_if_it_had_never_been(trained, tmp_path, monkeypatch, at):
    loss = drafter_module.DrafterTask.loss

    def interrupted(self, step):
        if step == at:
            raise KeyboardInterrupt
        return loss(self, step)

    monkeypatch.setattr(drafter_module.DrafterTask, "loss", interrupted)
    # Every step leaves a checkpoint.
    fit = drafter_module.fit
    monkeypatch.setattr(drafter_module, "fit", lambda *args, **more: fit(*args, report_every_seconds=0, **more))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path)
    monkeypatch.setattr(drafter_module.DrafterTask, "loss", loss)
    again = train(tmp_path).drafter.state_dict()
    for name, value in trained[0].drafter.state_dict().items():
        assert torch.equal(again[name], value), name


def test_packaged_recipes_tell_how_drafters_are_trained():
    parts = [recipe["drafter"] for recipe in map(load_recipe, RECIPES.glob("*.toml")) if "drafter" in recipe]
    assert parts
    for part in parts:
        assert DrafterSettings(OptimizerSettings(**part["optimizer"]), **part["training"]).batch_size >= 1
