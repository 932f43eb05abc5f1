"""A denoiser learns to predict after noise what its transformer predicts after tokens, and leaves the transformer as
it was."""

from dataclasses import replace

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from training.test_drafter import pictures

from arimage import AutoPipeline
from arimage.training.acceleration import denoiser as denoiser_module
from arimage.training.acceleration.denoiser import DenoiserSettings, DenoiserTask, train_denoiser
from arimage.training.loop import OptimizerSettings
from arimage_emoji import RECIPES
from arimage_emoji.training.recipe import load_recipe


SETTINGS = DenoiserSettings(
    OptimizerSettings(steps=40, learning_rate=2e-2, warmup_steps=4, ema_decay=0.8),
    batch_size=4,
    segments=4,
    length=6,
    rank=16,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        losses, loss = [], DenoiserTask.loss
        monkeypatch.setattr(DenoiserTask, "loss", lambda self, step: losses.append(loss(self, step)) or losses[-1])
        pipe = tiny_llamagen.text_pipeline()
        pipe.register_modules(denoiser=None)
        pipe = train_denoiser(pipe, pictures(6, 0), pictures(3, 1), SETTINGS, tmp_path_factory.mktemp("run"))
    return pipe, [{name: float(value) for name, value in figures.items()} for _, figures in losses]


def test_the_loss_falls_and_the_distributions_come_closer(trained):
    _, figures = trained
    first, last = (
        {name: sum(row[name] for row in rows) / 4 for name in rows[0]} for rows in (figures[:4], figures[-4:])
    )
    assert last["loss"] < 0.9 * first["loss"] and last["overlap"] > 1.1 * first["overlap"]


def test_only_the_denoiser_is_trained(trained):
    pipe, before = trained[0], tiny_llamagen.text_pipeline()
    for name, module in before.components.items():
        if isinstance(module, torch.nn.Module) and name != "denoiser":
            for key, value in module.state_dict().items():
                assert torch.equal(getattr(pipe, name).state_dict()[key], value), f"{name} {key}"


@pytest.mark.slow
def test_the_transformer_may_be_fine_tuned_with_it(tmp_path):
    pipe, before = tiny_llamagen.text_pipeline(), tiny_llamagen.text_pipeline()
    pipe.register_modules(denoiser=None)
    settings = replace(SETTINGS, fine_tune=True, optimizer=replace(SETTINGS.optimizer, learning_rate=2e-3))
    pipe = train_denoiser(pipe, pictures(6, 0), pictures(3, 1), settings, tmp_path)
    modules = {name: part for name, part in before.components.items() if isinstance(part, torch.nn.Module)}
    changed = {
        name
        for name, module in modules.items()
        for key, value in module.state_dict().items()
        if name != "denoiser" and not torch.equal(getattr(pipe, name).state_dict()[key], value)
    }
    assert changed == {"transformer"}
    assert pipe("a red heart", decoding="sjd2", output_type="latent").stats.exact
    # It still predicts about what it predicted.
    task = DenoiserTask(pipe.denoiser, before, pictures(6, 0), pictures(3, 1), SETTINGS)
    captions, codes = task.train_set
    condition = before.prepare(captions[:4], guidance_scale=2.0).model.condition
    with torch.no_grad():
        now, then = (it.transformer.predict(codes[:4].repeat(2, 1), **condition).softmax(-1) for it in (pipe, before))
    assert torch.minimum(now, then).sum(-1).mean() > 0.8


def test_training_reads_what_decoding_reads(monkeypatch):
    """Every segment of a batch has the logits of a forward pass over the clean tokens before it and its own noise."""
    pipe, calls = tiny_llamagen.text_pipeline(), []
    task = DenoiserTask(pipe.denoiser, pipe, pictures(4, 0), pictures(2, 1), SETTINGS)
    forward = pipe.transformer.forward

    def recorded(*args, **options):
        calls.append((options, forward(*args, **options)))
        return calls[-1][1]

    monkeypatch.setattr(pipe.transformer, "forward", recorded)
    captions, codes = ["a red heart", "a green tree"], task.train_set[1][:2]
    with torch.no_grad():
        task.figures(captions, codes, 0.5, torch.Generator().manual_seed(0))
    (_, (options, logits)), size = calls, (2, 2, SETTINGS.segments, SETTINGS.length)
    monkeypatch.setattr(pipe.transformer, "forward", forward)
    vectors, noise = options["vectors"].unflatten(1, size[2:])[:2], options["noise"].unflatten(1, size[2:])[:2]
    assert (noise[..., 1:] >= noise[..., :-1]).all() and 0 < (noise == 1).all(-1).float().mean() < 1
    seen = options["mask"][:2, :, -(15 + SETTINGS.segments * SETTINGS.length) :][..., :15].sum(-1)
    first = seen.unflatten(1, size[2:])[..., 0]
    model = pipe.prepare(captions, guidance_scale=2.0).model
    for segment in range(SETTINGS.segments):
        cache, _ = model.prefill(2)
        everywhere = torch.arange(15).expand(2, -1)
        fed = torch.where(everywhere < first[:, segment, None], everywhere, -1)
        positions = first[:, segment, None] + torch.arange(SETTINGS.length)
        with torch.no_grad():
            model.forward(codes[:, :15], fed, cache)
            noisy = {"vectors": vectors[:, segment], "noise": noise[:, segment]}
            expected = model.forward(codes.gather(1, positions), positions, cache, **noisy)
        torch.testing.assert_close(logits.view(*size, -1)[:, :, segment], expected, atol=1e-4, rtol=1e-4)


def test_the_command_saves_the_model_with_its_denoiser(tmp_path, monkeypatch):
    monkeypatch.setattr(denoiser_module, "load_both", lambda recipe, part, *paths: (pictures(4, 0), pictures(4, 0)))
    part = {"optimizer": {"steps": 2, "learning_rate": 1e-3}, "training": {"samples_per_image": 0, "length": 4}}
    pipe = tiny_llamagen.text_pipeline()
    pipe.register_modules(denoiser=None)
    denoiser_module.run_denoiser({"image_size": 8, "denoiser": part}, pipe, "train", "heldout", tmp_path)
    pipe = AutoPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    stats = pipe("a red heart", decoding="sjd2", output_type="latent").stats
    assert stats.exact and stats.forward_passes <= 16


def test_packaged_recipes_tell_how_denoisers_are_trained():
    parts = [recipe["denoiser"] for recipe in map(load_recipe, RECIPES.glob("*.toml")) if "denoiser" in recipe]
    assert parts
    for part in parts:
        assert DenoiserSettings(OptimizerSettings(**part["optimizer"]), **part["training"]).batch_size >= 1
