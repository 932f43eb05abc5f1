"""The losses of models that decide masked places."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipelines.halton_maskgit import tiny

from arimage.training.losses import losses_of


CAPTIONS = ["a red heart", "cat"]


def losses(network, judges, pipe):
    found: Any = losses_of(pipe, CAPTIONS[0], judges=judges)
    found.pipe, found.conditions = SimpleNamespace(transformer=network), lambda captions: {}
    return found


class Network:
    """Its loss at a masked place is one of `nats`, by how many places are masked, and 7 at the others."""

    def __init__(self, nats, vocab_size=16):
        self.config, self.nats, self.fed = SimpleNamespace(vocab_size=vocab_size), nats, []

    def __call__(self, tokens, *, unconditional):
        masked = tokens == self.config.vocab_size
        self.fed.append(tokens)
        nats = torch.where(masked, self.nats[masked.sum(1)][:, None], 7.0)
        # The tokens are all 0.
        logits = torch.full((*tokens.shape, self.config.vocab_size), -torch.inf)
        logits[..., 0], logits[..., 1] = -nats, torch.log1p(-torch.exp(-nats))
        return logits


@pytest.fixture(scope="module")
def pipe():
    return tiny.pipeline("text")


def test_a_model_is_judged_by_the_likelihood_of_one_place_after_the_other(pipe):
    nats = torch.rand(17, generator=torch.Generator().manual_seed(0)) + 0.1
    network = Network(nats)
    tokens, kept = torch.zeros(16, 16, dtype=torch.long), torch.zeros(16, dtype=torch.bool)
    judged = losses(network, True, pipe)(CAPTIONS * 8, tokens, kept, 16, torch.Generator().manual_seed(0))
    # Every number of masked places once: the chain rule over 16 places.
    assert judged.shape == (16, 16) and float(16 * judged.mean()) == pytest.approx(float(nats[1:].sum()), rel=1e-4)
    losses(network, True, pipe)(CAPTIONS * 8, tokens, kept, 16, torch.Generator().manual_seed(0))
    assert torch.equal(*network.fed)


def test_training_learns_all_places_with_shares_of_the_arccosine(pipe):
    network = Network(torch.full((101,), 2.0))
    tokens, kept = torch.zeros(4000, 100, dtype=torch.long), torch.zeros(4000, dtype=torch.bool)
    found = losses(network, False, pipe)(CAPTIONS * 2000, tokens, kept, 100, torch.Generator().manual_seed(0))
    masked = network.fed[0] == 16
    torch.testing.assert_close(found, torch.where(masked, 2.0, 7.0), rtol=1e-4, atol=0)
    shares = masked.float().mean(1)
    assert shares.min() > 0 and shares.max() == 1
    # P(2 / pi arccos(u) <= s) = 1 - cos(pi s / 2), rounded up to whole places.
    for share in (0.25, 0.5, 0.75):
        expected = 1 - torch.tensor(torch.pi * share / 2).cos()
        assert (shares <= share).float().mean() == pytest.approx(float(expected), abs=0.025)
    # No place is masked more often than others.
    assert (masked.float().mean(0) - masked.float().mean()).abs().max() < 0.03


def test_gradients_reach_the_text_encoder_where_it_learns_and_dropped_captions_do_not_matter(pipe):
    tokens = torch.randint(pipe.transformer.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    trained = losses_of(pipe, CAPTIONS[0], trains_text=True)

    def learn(captions, dropped):
        return trained(captions, tokens, torch.tensor(dropped), 16, torch.Generator().manual_seed(0))

    learn(CAPTIONS, [False, True]).mean().backward()
    assert pipe.text_encoder.shared.weight.grad.any() and pipe.transformer.position_embedding.weight.grad.any()
    with torch.no_grad():
        one, other = learn(CAPTIONS, [False, True]), learn(["cat", "a red heart"], [False, True])
    torch.testing.assert_close(one[1], other[1])
    assert not torch.allclose(one[0], other[0])


def test_a_new_network_is_a_plain_transformer(pipe):
    network = tiny.transformer("text")
    network.init_weights()
    hidden, condition = torch.randn(2, 5, network.config.hidden_size), torch.randn(2, 1, network.config.hidden_size)
    block = network.blocks[0]
    with torch.no_grad():
        found = block(hidden, condition)
        plain = hidden + block.attention(block.attention_norm(hidden), None)
        plain = plain + block.feed_forward(block.feed_forward_norm(plain))
    torch.testing.assert_close(found, plain)
