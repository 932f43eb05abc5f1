"""A model of neighbours learns what tokens are next to each other, and saves forward passes of its pipeline."""

from functools import partial

import pytest
import torch
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.janus import tiny as tiny_janus
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from training.tokens.test_cache import encode, parquet

from arimage import AutoPipeline
from arimage.training.acceleration import neighbours
from arimage.training.acceleration.neighbours import around, fit_neighbours, run_neighbours


def test_the_tokens_around_are_those_of_the_offsets():
    grid = torch.arange(6).view(1, 2, 3)
    assert around(grid)[0].tolist() == [
        [-1, -1, -1, -1], [0, -1, -1, -1], [1, -1, -1, -1],
        [-1, 0, -1, 1], [3, 1, 0, 2], [4, 2, 1, -1],
    ]  # fmt: skip


def test_it_learns_which_tokens_follow_which():
    # Each token is one more than that above.
    first = torch.randint(5, (64, 1, 4), generator=torch.Generator().manual_seed(0))
    tokens = (first + torch.arange(4)[:, None]) % 5
    model = fit_neighbours(tokens, 5, rank=8, steps=150, batch_size=256)
    inside = torch.arange(16) >= 4
    right = model(around(tokens)).argmax(-1) == tokens.flatten(1)
    assert right[:, inside].float().mean() > 0.95
    again = fit_neighbours(tokens, 5, rank=8, steps=150, batch_size=256)
    assert torch.equal(model.out_proj.weight, again.out_proj.weight)


def test_the_command_saves_the_model_with_it(tmp_path):
    pipe = tiny_llamagen.text_pipeline()
    pipe.register_modules(neighbours=None)
    with pytest.raises(ValueError, match="no model of neighbours: fit one with `arimage train neighbours`"):
        pipe("a red heart", decoding="sjd-coupled:corrections=2")
    parquet(tmp_path / "a.parquet", range(3), caption=["a red heart", "a tree", "a house"])
    encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens")
    run_neighbours(pipe, tmp_path / "tokens", tmp_path)
    pipe = AutoPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    stats = pipe("a red heart", decoding="sjd-coupled:corrections=2", output_type="latent").stats
    assert stats.exact and stats.forward_passes <= 16


@pytest.mark.parametrize("family", [tiny_janus, tiny_emu3, tiny_chameleon], ids=["janus", "emu3", "lumina-mgpt"])
def test_language_models_have_one_too(family, tmp_path, monkeypatch):
    monkeypatch.setattr(neighbours, "fit_neighbours", partial(fit_neighbours, steps=2))
    pipe = family.pipeline()
    parquet(tmp_path / "a.parquet", range(3), caption=["a red heart", "a tree", "a house"])
    encode(pipe, tmp_path / "a.parquet", tmp_path / "tokens")
    run_neighbours(pipe, tmp_path / "tokens", tmp_path)
    pipe = AutoPipeline.from_pretrained(tmp_path / "model")
    pipe.set_progress_bar_config(disable=True)
    found = pipe("a red heart", decoding="sjd-coupled:corrections=2", output_type="latent")
    assert found.stats.exact and found.stats.forward_passes <= found.tokens[0].numel()


def test_other_models_are_refused(tmp_path):
    with pytest.raises(ValueError, match="--model is one in a VARPipeline, which has no neighbours: give another one"):
        run_neighbours(tiny_var.pipeline("text"), "x", tmp_path)
