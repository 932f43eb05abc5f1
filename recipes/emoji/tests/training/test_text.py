"""The text encoder that is trained first."""

import numpy as np
import pytest
import torch
from transformers import T5Config, T5EncoderModel

from arimage.training.loop import OptimizerSettings
from arimage.training.tokens.text import train_text_tokenizer
from arimage_emoji.training.captioned import ImageCaptions
from arimage_emoji.training.text import TextSettings, TextTask, train_text_encoder


SETTINGS = OptimizerSettings(25, 1e-2)


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
