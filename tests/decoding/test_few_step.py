"""What few-step decoding asks of a model, and keeps of what it returns."""

import pytest
import torch

from arimage.decoding import FewStepDecoding, Sampling, decode
from arimage.decoding.contract.noise import Purpose, normals


SEEDS = torch.arange(3)


class Doubling:
    """Three levels of 1, 2 and 3 tokens of width 2. It returns twice what it is fed, and the code whose number is the
    start."""

    kind = "vectors"

    offsets, num_tokens, vocab_size, codes_until = (0, 1, 3, 6), 6, 4, 1
    device, network, teacher, noise = torch.device("cpu"), None, None, None
    codebook = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0], [10.0, 10.0]])

    def __init__(self):
        self.fed = []

    def predict(self, vectors, start):
        self.fed.append((vectors.clone(), start))
        logits = torch.zeros(*vectors.shape[:2], self.vocab_size)
        logits[..., start % self.vocab_size] = 1
        return 2 * vectors, logits


def test_every_pass_gets_the_noise_again_and_keeps_what_is_before_its_start():
    model = Doubling()
    state = decode(model, FewStepDecoding(starts=(0, 1, 2), codes_until=2), Sampling(), SEEDS)
    noise = normals(SEEDS, torch.arange(6).expand(3, -1), None, Purpose.NOISE, 2)
    (first, _), (second, _), (third, _) = model.fed
    assert [start for _, start in model.fed] == [0, 1, 3]
    assert torch.equal(first, noise)
    # One token of the first level, then two of the second, all from the code head.
    assert torch.equal(second[:, :1], torch.zeros(3, 1, 2)) and torch.equal(second[:, 1:], noise[:, 1:])
    assert torch.equal(third[:, 1:3], model.codebook[[1, 1]].expand(3, -1, -1)) and torch.equal(
        third[:, 3:], noise[:, 3:]
    )
    assert torch.equal(state.vectors, torch.cat([third[:, :3], 2 * noise[:, 3:]], dim=1))
    nearest = (state.vectors[:, :, None] - model.codebook).square().sum(-1).argmin(-1)
    assert torch.equal(state.tokens, nearest)
    assert state.accepted_per_step()[:, 0].tolist() == [1, 2, 3] and bool(state.finished.all())


def test_where_codes_end_is_what_the_checkpoint_says_by_default():
    vectors = [decode(Doubling(), FewStepDecoding(codes_until=one), Sampling(), SEEDS).vectors for one in (None, 1, 0)]
    assert torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[1][:, 0], vectors[2][:, 0])
    assert torch.equal(vectors[1][:, 1:], vectors[2][:, 1:])
    silent = Doubling()
    silent.codes_until = None
    with pytest.raises(ValueError, match="codes_until"):
        decode(silent, FewStepDecoding(), Sampling(), SEEDS)


@pytest.mark.parametrize("broken", [0, 5], ids=["code", "vector"])
def test_what_is_not_finite_is_an_error_that_names_the_image(broken):
    model = Doubling()
    predict = model.predict

    def spoiled(vectors, start):
        vectors, logits = predict(vectors, start)
        vectors[1, broken], logits[1, broken] = torch.nan, torch.nan
        return vectors, logits

    model.predict = spoiled
    with pytest.raises(ValueError, match="images 1 "):
        decode(model, FewStepDecoding(), Sampling(), SEEDS)


def test_a_step_after_the_end_changes_nothing():
    decoding = FewStepDecoding(codes_until=0)
    state = decode(Doubling(), decoding, Sampling(), torch.arange(3))
    tokens, steps = state.tokens.clone(), state.steps.clone()
    decoding.step(state)
    assert torch.equal(state.tokens, tokens) and torch.equal(state.steps, steps) and state.finished.all()
