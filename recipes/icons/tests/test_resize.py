"""What a training on more words begins with: the old model, narrower, with embeddings of new words."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5EncoderModel

from arimage.models.layers import FeedForward
from arimage_icons.resize import cut, with_words
from arimage_icons.words import word_tokenizer


def test_known_words_keep_their_embeddings():
    torch.manual_seed(0)
    old, new = word_tokenizer(["heart", "arrow left"]), word_tokenizer(["apple", "heart", "arrow left", "zebra"])
    size = {"d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1}
    encoder = T5EncoderModel(T5Config(vocab_size=len(old), **size)).eval()

    def states(tokenizer, text):
        with torch.no_grad():
            return encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state

    before = states(old, "thin arrow left")
    with_words(encoder, old, new)
    assert encoder.config.vocab_size == len(new) == len(old) + 2
    assert torch.equal(states(new, "a thin arrow left"), before)
    assert states(new, "zebra").allclose(states(new, "apple"), atol=1e-2)


@pytest.mark.parametrize("width", [6, 11])
def test_the_projection_is_the_best_one_for_the_units_that_are_kept(width):
    torch.manual_seed(1)
    layer, states = FeedForward(8, 12).requires_grad_(False), torch.randn(256, 8)
    hidden = (nn.functional.silu(layer.gate_proj(states)) * layer.up_proj(states)).double()
    weights = cut(layer, hidden.T @ hidden, width)
    kept = [place for place in range(12) if (weights["up_proj.weight"] == layer.up_proj.weight[place]).all(1).any()]
    best = torch.linalg.lstsq(hidden[:, kept], hidden @ layer.down_proj.weight.double().T).solution.T.float()
    assert len(kept) == width and weights["down_proj.weight"].allclose(best, atol=1e-3)
