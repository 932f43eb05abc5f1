"""Videos: drafts from the frame before, and a lazy window that looks along time."""

import pytest
import torch

from arimage.decoding import (
    Layout,
    LazyJacobiDecoding,
    Sampling,
    SpeculativeJacobiDecoding,
    TreeJacobiDecoding,
    decode,
)
from arimage.decoding.contract.cache import Cache


SHAPE = (3, 2, 3)
PREVIOUS = [
    SpeculativeJacobiDecoding(window=5, init="previous"),
    TreeJacobiDecoding(5, 2, 2, init="previous"),
    LazyJacobiDecoding(8, 2, 4, init="previous"),
]


class StillModel(Cache):
    """A `TokenModel` whose every frame repeats the one before, `context` at first, and its cache."""

    kind = "tokens"
    predicts_groups = denoises = False
    codebook = drafter = neighbours = None
    vocab_size, device, network, block = 50, torch.device("cpu"), None, 1

    def __init__(self, layout, context):
        self.layout, self.num_tokens, self.context = layout, layout.num_tokens, context

    def prefill(self, batch_size, scratch=0):
        self.fed = torch.cat([self.context, torch.full((batch_size, self.num_tokens + scratch + 1), -1)], dim=1)
        self.visible = 0
        return self, self._logits(self.context[:, :1])[:, :, 0]

    def forward(self, tokens, positions, cache, *, visible=None, slots=None):
        size = self.context.shape[1]
        slots = positions if slots is None else slots
        at = torch.where(positions < 0, self.fed.shape[1] - 1 - size, slots)
        self.fed.scatter_(1, size + at, tokens)
        return self._logits(self.fed.gather(1, positions.clamp(min=0) + 1))

    def move(self, source, target):
        size = self.context.shape[1]
        self.fed.scatter_(1, size + target % (self.fed.shape[1] - size), self.fed.gather(1, size + source))

    def _logits(self, tokens):
        return 100.0 * torch.nn.functional.one_hot(tokens.clamp(min=0), self.vocab_size)[None]


def still(batch_size=3):
    context = torch.randint(50, (batch_size, 6), generator=torch.Generator().manual_seed(0))
    return StillModel(Layout(SHAPE), context)


@pytest.mark.parametrize("decoding", PREVIOUS, ids=str)
def test_a_still_video_is_decided_as_fast_as_the_window_allows(decoding):
    model = still()
    state = decode(model, decoding, Sampling(), torch.arange(3))
    assert torch.equal(state.tokens, model.context.repeat(1, 3))
    accepted = state.accepted_per_step()
    full = {SpeculativeJacobiDecoding: 5, TreeJacobiDecoding: 5, LazyJacobiDecoding: 2}[type(decoding)]
    assert (accepted[1:-1] >= full).all()


@pytest.mark.parametrize("init", ["uniform", "left", "above"])
def test_other_drafts_of_a_still_video_are_slower(init):
    passes = {}
    for name in (init, "previous"):
        decoding = SpeculativeJacobiDecoding(window=5, refresh="independent", init=name)
        passes[name] = decode(still(), decoding, Sampling(), torch.arange(3)).forward_passes
    assert passes["previous"] == 5 < passes[init]
