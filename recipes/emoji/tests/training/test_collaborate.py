"""Each transformer of a pair is fine-tuned for its own scales, and goes on after an interruption."""

import pytest
import tiny
import torch
from pipelines.var import tiny as tiny_var

from arimage import AutoPipeline, CollaborativeDecoding
from arimage.training.acceleration import collaborate as collaborate_module
from arimage.training.acceleration.collaborate import run_collaborate, train_collaborate
from arimage.training.loop import OptimizerSettings, fit
from arimage_emoji.training import captions as captions_module
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.transformers.var import VARTransformerSettings, VARTransformerTask


OPTIMIZER = {"steps": 12, "learning_rate": 5e-3, "warmup_steps": 2, "ema_decay": 0.5}
SETTINGS = VARTransformerSettings(OptimizerSettings(**OPTIMIZER), batch_size=8, caption_length=tiny.TEXT_LENGTH)


def pictures():
    """Two pictures of one colour each."""
    side = tiny.SCALES[-1] * tiny.SCALE_FACTOR
    return ImageCaptions(
        images=torch.tensor([40, 200], dtype=torch.uint8)[:, None, None, None].repeat(1, 3, side, side),
        alpha=torch.full((2, 1, side, side), 255, dtype=torch.uint8),
        captions=[["a red heart"], ["a green tree"]],
        names=["name"] * 2,
        bases=["base"] * 2,
        weights=torch.ones(2),
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(collaborate_module, "load_both", lambda recipe, part, *paths: (pictures(), pictures()))


def train(out, drafter_scales=2, pipe=None):
    pipe = pipe or tiny_var.pipeline("text")
    return train_collaborate(pipe, pictures(), pictures(), drafter_scales, SETTINGS, SETTINGS, out)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The pair, and the losses by scale of all steps."""
    figures, loss = [], VARTransformerTask.loss
    with pytest.MonkeyPatch.context() as monkeypatch:

        def recorded(self, step):
            total, by_scale = loss(self, step)
            figures.append([float(value) for value in by_scale.values()])
            return total, by_scale

        monkeypatch.setattr(VARTransformerTask, "loss", recorded)
        pipe = train(tmp_path_factory.mktemp("run"))
    return pipe, figures


def test_each_learns_its_own_scales(trained):
    pipe, figures = trained
    drafter, refiner = figures[:12], figures[12:]
    assert {len(row) for row in drafter} == {2} and {len(row) for row in refiner} == {4} and len(refiner) == 12
    assert sum(map(sum, drafter[-4:])) < 0.9 * sum(map(sum, drafter[:4]))
    assert sum(sum(row[2:]) for row in refiner[-4:]) < 0.9 * sum(sum(row[2:]) for row in refiner[:4])
    assert pipe.decoding == CollaborativeDecoding(2)


def test_text_and_tokenizer_stay_as_they_were(trained):
    pipe, before = trained[0], tiny_var.pipeline("text")
    for name in ("text_encoder", "vq"):
        for key, value in getattr(before, name).state_dict().items():
            assert torch.equal(getattr(pipe, name).state_dict()[key], value), f"{name} {key}"


@pytest.mark.slow
def test_the_teacher_is_the_large_model_as_it_was(tmp_path, monkeypatch):
    teachers, init = [], VARTransformerTask.__init__

    def recorded(self, network, pipe, data, heldout, settings, teacher=None, decoding="next-scale"):
        teachers.append(teacher)
        init(self, network, pipe, data, heldout, settings, teacher, decoding)

    monkeypatch.setattr(VARTransformerTask, "__init__", recorded)
    pipe, before = train(tmp_path), tiny_var.pipeline("text").transformer.state_dict()
    assert teachers[0] is None and not any(p.requires_grad for p in teachers[1].parameters())
    assert all(torch.equal(value, before[name]) for name, value in teachers[1].state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in pipe.transformer.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("part", [pytest.param("drafter", marks=pytest.mark.slow), "refiner"])
def test_an_interrupted_run_ends_as_if_it_had_never_been(trained, tmp_path, monkeypatch, part):
    loss = VARTransformerTask.loss

    def interrupted(self, step):
        if (self.settings.first_scale == 0) == (part == "drafter") and step == 5:
            raise KeyboardInterrupt
        return loss(self, step)

    with monkeypatch.context() as broken:
        broken.setattr(VARTransformerTask, "loss", interrupted)
        # Every step of the part leaves a checkpoint.
        seconds = {part: -1.0}
        broken.setattr(
            captions_module,
            "fit",
            lambda task, settings, out, **more: fit(
                task, settings, out, report_every_seconds=seconds.get(out.name, 300.0), **more
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
    assert torch.load(tmp_path / part / "checkpoint.pt", weights_only=True)["step"] == 5
    again = train(tmp_path)
    for name in ("transformer", "refiner"):
        for key, value in getattr(trained[0], name).state_dict().items():
            assert torch.equal(getattr(again, name).state_dict()[key], value), f"{name} {key}"


def test_the_command_saves_the_pair(tmp_path):
    part = {"optimizer": OPTIMIZER | {"steps": 2}, "training": {"law_weight": 0.5}}
    recipe = {
        "image_size": 8,
        "transformer": {
            "model": {},
            "optimizer": OPTIMIZER,
            "training": {"batch_size": 2, "sample_prompts": ["a red heart"]},
        },
        "collaborate": {"drafter_scales": 3, "drafter": part, "refiner": part},
    }
    run_collaborate(recipe, tiny_var.pipeline("text"), "train", "heldout", tmp_path)
    pipe = AutoPipeline.from_pretrained(tmp_path / "model")
    assert pipe.decoding == CollaborativeDecoding(3) and pipe.refiner.config.hidden_size == 16
    pipe.set_progress_bar_config(disable=True)
    stats = pipe("a red heart", output_type="latent").stats
    assert not stats.exact and stats.forward_passes == 4


@pytest.mark.parametrize("drafter_scales", [0, 4])
def test_both_need_scales_to_draw(tmp_path, drafter_scales):
    with pytest.raises(ValueError, match=f"drafter_scales is {drafter_scales}: give a number from 1 to 3"):
        train(tmp_path, drafter_scales)


def test_a_pair_is_needed(tmp_path):
    with pytest.raises(ValueError, match="has no refiner: train one"):
        train(tmp_path, pipe=tiny_var.pipeline("text", refiner=False))
