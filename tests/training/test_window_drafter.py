"""A drafter of windows learns from what the model computes while it generates."""

import json
import sys

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from training.tokens.test_cache import encode, parquet

from arimage import AutoPipeline, SpeculativeJacobiDecoding, WindowDrafter
from arimage.cli import main as cli
from arimage.settings.schema import check
from arimage.training import commands
from arimage.training.acceleration.parts import OVERLAP, run_part
from arimage.training.acceleration.window_drafter import begin_window_drafter, record
from arimage.training.recipe import PartRecipe


MODELS = {"text": tiny_llamagen.text_pipeline, "class": tiny_llamagen.class_pipeline}
TRAINING = {"images": 8, "at_once": 4, "batch_size": 32, "window": 6, "corrections": 2}
DECODING = "sjd-coupled:window=6,corrections=2"


def made(kind):
    pipe = MODELS[kind]()
    pipe.register_modules(neighbours=None)
    return pipe


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokens")
    parquet(root / "text.parquet", range(20), caption=["a red heart", "a green tree"] * 10)
    parquet(root / "class.parquet", range(20), label=[number % 10 for number in range(20)])
    for kind in MODELS:
        encode(made(kind), root / f"{kind}.parquet", root / kind, model=kind)
    return root


@pytest.mark.parametrize("kind", MODELS)
def test_the_command_saves_the_model_with_it(kind, caches, tmp_path, monkeypatch):
    settings = "\n".join(f"{key} = {value}" for key, value in TRAINING.items())
    table = (
        f"[optimizer]\nsteps = 2\nlearning_rate = 1e-3\n[model]\nrank = 4\nhidden_size = 16\n[training]\n{settings}\n"
    )
    (tmp_path / "mine.toml").write_text(f'part = "drafter"\nkind = "window"\n{table}')
    monkeypatch.setattr(commands, "load_pipeline", lambda *_: made(kind))
    words = [
        "--model",
        "emoji-llamagen",
        "--tokens",
        caches / kind,
        "--recipe",
        tmp_path / "mine.toml",
        "--out",
        tmp_path / "run",
    ]
    monkeypatch.setattr(sys, "argv", ["arimage", "train", "drafter", *map(str, words)])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    figures = json.loads((tmp_path / "run" / "acceptance.json").read_text())
    assert all(0 < figures[f"held-out {OVERLAP} {when}"] <= 1 for when in ("before", "after"))
    passes = {name for name in figures if name.startswith("tokens per forward pass")}
    assert {name.rpartition("=")[2] for name in passes} == {"0", "2"} and all(figures[name] >= 1 for name in passes)
    pipe = AutoPipeline.from_pretrained(tmp_path / "run" / "model")
    pipe.set_progress_bar_config(disable=True)
    assert isinstance(pipe.neighbours, WindowDrafter) and pipe.neighbours.config.rank == 4
    given = {"prompt": "a red heart"} if kind == "text" else {"class_labels": 3}
    stats = pipe(**given, decoding=DECODING, output_type="latent").stats
    assert stats.exact and stats.forward_passes <= 16


def test_it_comes_closer_on_held_out_images_and_changes_nothing_else(caches, tmp_path):
    pipe, before = made("text"), made("text")
    optimizer = {"steps": 40, "learning_rate": 1e-2, "warmup_steps": 2, "ema_decay": 0.8}
    recipe = {"part": "drafter", "kind": "window", "optimizer": optimizer, "training": TRAINING}
    figures = run_part(
        begin_window_drafter, check(PartRecipe, recipe, "mine.toml"), pipe, caches / "text", None, tmp_path
    )
    assert figures[f"held-out {OVERLAP} after"] > figures[f"held-out {OVERLAP} before"]
    for name, module in before.components.items():
        if isinstance(module, torch.nn.Module):
            for weight, value in module.state_dict().items():
                assert torch.equal(getattr(pipe, name).state_dict()[weight], value), f"{name} {weight}"


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_drafts_are_recorded_next_to_which_a_token_was_wrong(scale):
    """In a window of two, all that can be wrong before a draft is the token to the left."""
    pipe = made("text")
    drafter = WindowDrafter.for_transformer(pipe.transformer, further=[])
    decoding = SpeculativeJacobiDecoding(2)
    drafts = record(pipe, drafter, ["a red heart", "a tree"], scale, decoding, 1.0, 0)
    assert drafts.features.shape == drafts.target.shape == (len(drafts.places), 32)
    assert (drafts.now != drafts.before)[:, 0].all() and (drafts.now == drafts.before)[:, 1:].all()
    assert len(drafts.places) and (drafts.places % 4 > 0).all()
    assert ((drafts.features - drafts.target).abs().amax(1) > 0.1).all()
