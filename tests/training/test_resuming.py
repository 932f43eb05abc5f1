"""What an interruption leaves is used, healed or refused in one sentence."""

import pytest
import torch

from arimage.training.loop import OptimizerSettings, fit


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
