"""Processes that train together, and the text encoder that is trained first."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from training.train_together import SETTINGS, Mean
from transformers import T5Config, T5EncoderModel

from arimage.training.data.captioned import ImageCaptions
from arimage.training.loop import OptimizerSettings, fit
from arimage.training.processes import batch_generator
from arimage.training.texts.captions import train_text_tokenizer
from arimage.training.texts.text import TextSettings, TextTask, train_text_encoder


@pytest.mark.slow
def test_torchrun_trains_as_one(tmp_path):
    script = Path(__file__).with_name("train_together.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, tmp_path]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    subprocess.run(run, env=environment, check=True, capture_output=True)
    check_batches(tmp_path)


def check_batches(folder):
    """Two processes took the batches of both. `tokens/test_task.py` starts them without torchrun, in less time."""
    # Step 0 of two processes takes the batches 0 and 1, step 1 the batches 2 and 3, and so on.
    points = [
        torch.cat([torch.rand(4, 3, generator=batch_generator(7, 2 * step + rank)) for rank in (0, 1)])
        for step in range(25)
    ]
    alone = Mean(torch.stack(points))
    fit(alone, SETTINGS, folder / "alone")
    for rank in (0, 1):
        # Those of torchrun round to bfloat16 where that is fast, this one does not.
        state = torch.load(folder / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(state, alone.state_dict(), atol=1e-2, rtol=0)
    assert (folder / "rank0" / "checkpoint.pt").exists() and not (folder / "rank1" / "checkpoint.pt").exists()


def test_what_trains_in_one_process_is_refused_under_torchrun(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="trains in one process: start it without torchrun"):
        fit(Mean(), SETTINGS, tmp_path)


@pytest.fixture
def colours() -> ImageCaptions:
    named = {"red": (220, 30, 30), "green": (20, 180, 60), "blue": (30, 60, 230), "white": (255, 255, 255)}
    images = np.stack([np.tile(np.array(colour, np.uint8)[:, None, None], (1, 16, 16)) for colour in named.values()])
    return ImageCaptions(
        images=torch.from_numpy(images),
        alpha=torch.full((4, 1, 16, 16), 255, dtype=torch.uint8),
        captions=[[f"a {name} field", f"{name} everywhere"] for name in named],
        names=list(named),
        bases=list(named),
        weights=torch.ones(4),
    )


def test_a_text_encoder_learns_to_tell_captions_apart(colours, tmp_path):
    torch.manual_seed(0)
    captions = [caption for variants in colours.captions for caption in variants]
    tokenizer = train_text_tokenizer(captions, 300, 8)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1, dropout_rate=0.0
    )
    encoder = T5EncoderModel(config)
    optimizer = OptimizerSettings(60, 1e-2, warmup_steps=5, ema_decay=0.9)
    settings = TextSettings(optimizer, batch_size=8, picture_size=4)
    train_text_encoder(tokenizer, encoder, colours, settings, tmp_path)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 60
    task = TextTask(tokenizer, encoder, colours, settings)
    # The projections of the task that was trained are gone: the states alone must tell the captions apart.
    with torch.no_grad():
        features = task.text_features(captions)
    near = (features @ features.T).fill_diagonal_(-1).argmax(-1)
    # The nearest caption is the other one of the same picture.
    assert near.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]


def test_a_picture_twice_in_a_batch_is_not_distinguished_from_itself(colours):
    captions = [caption for variants in colours.captions for caption in variants]
    tokenizer = train_text_tokenizer(captions, 300, 8)
    encoder = T5EncoderModel(
        T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, num_heads=2, d_ff=32, num_layers=1)
    )
    colours.weights = torch.tensor([1.0, 0, 0, 0])
    task = TextTask(tokenizer, encoder, colours, TextSettings(SETTINGS, batch_size=6, picture_size=4))
    assert task.loss(0)[0].item() == 0.0
