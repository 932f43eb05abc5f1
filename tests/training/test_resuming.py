"""What an interruption leaves is used, healed or refused in one sentence."""

from dataclasses import replace

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.saving import save_float16


SETTINGS = OptimizerSettings(steps=4, learning_rate=0.1, warmup_steps=1)


class Mean(torch.nn.Module):
    """Some weights that become 0, and a buffer."""

    def __init__(self, width=3, depth=1, buffer=2):
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.ones(width, width) for _ in range(depth))
        self.shift = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(buffer))

    def loss(self, step):
        loss = self.shift.square() + sum(layer.square().mean() for layer in self.layers)
        return loss, {"loss": loss.detach()}

    def report(self, step, out):
        return {}


@pytest.mark.parametrize("damage", ["empty", "cut", "text", "other", "version"])
def test_a_damaged_checkpoint_is_refused(tmp_path, damage):
    fit(Mean(), SETTINGS, tmp_path)
    path = tmp_path / "checkpoint.pt"
    whole = path.read_bytes()
    if damage == "other":
        torch.save({"step": 1}, path)
    elif damage == "version":
        state = torch.load(path, weights_only=True)
        del state["weights"]["averages"]
        torch.save(state, path)
    else:
        path.write_bytes({"empty": b"", "cut": whole[: len(whole) // 2], "text": b"nothing"}[damage])
    with pytest.raises(ValueError, match=f"^{path} is damaged: delete it to train from the start$"):
        fit(Mean(), SETTINGS, tmp_path)
    path.write_bytes(whole)
    fit(Mean(), SETTINGS, tmp_path)


@pytest.mark.parametrize("model", [{"width": 4}, {"depth": 2}, {"buffer": 1}])
def test_a_checkpoint_of_another_recipe_is_refused(tmp_path, model):
    fit(Mean(), SETTINGS, tmp_path)
    with pytest.raises(ValueError, match="^.*checkpoint.pt was written by a recipe with another model or optimizer: "):
        fit(Mean(**model), SETTINGS, tmp_path)


def test_a_recipe_with_more_steps_goes_on(tmp_path):
    fit(Mean(), SETTINGS, tmp_path)
    fit(Mean(), replace(SETTINGS, steps=6), tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 6


@pytest.mark.parametrize("left", ["model.old", "partial", "model.old and no model"])
def test_what_a_killed_save_left_does_not_stop_the_next(tmp_path, left):
    pipe, folder = tiny_llamagen.class_pipeline(), tmp_path / "model"
    save_float16(pipe, folder)
    (tmp_path / left.split()[0] / "model").mkdir(parents=True)
    (tmp_path / left.split()[0] / "rest").write_text("x")
    if "no model" in left:
        folder.rename(tmp_path / "gone")
    save_float16(pipe, folder)
    assert AutoPipeline.from_pretrained(folder).num_classes == pipe.num_classes
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "gone"}
