"""The measured deviation is at its floor for exact decodings, and never above what it bounds for the others."""

import math

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var

from arimage.decoding import Layout, Sampling, decode, decoding_from_name, decoding_names
from arimage.decoding.contract.cache import Cache
from arimage.eval.bench.deviation import deviation, token_places


EXACT = [
    name for name in ("ar", "sjd", "sjd-coupled", "sjd-gumbel", "sjd-lazy", "sjd-tree") if name in decoding_names()
]
# `tests/decoding` is about each of them, and these tests about what measures them.
QUICK = ("ar", "sjd", "sjd-tree")


def marks(decoding):
    return () if decoding in QUICK else pytest.mark.slow


class NoCache(Cache):
    def move(self, source, target):
        """Nothing is cached."""


class TokenTable:
    """A `TokenModel` of four tokens on eight positions: random probabilities after each token and position."""

    kind = "tokens"
    predicts_groups = denoises = False
    layout, num_tokens, vocab_size, block = Layout((2, 4)), 8, 4, 1
    codebook = drafter = neighbours = None
    device = torch.device("cpu")

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(self.num_tokens, self.vocab_size, self.vocab_size, generator=generator)

    def prefill(self, batch_size, scratch=0):
        return NoCache(), self.table[0, 0].expand(1, batch_size, -1)

    def forward(self, tokens, positions, cache, *, visible=None, slots=None):
        return self.table[(positions + 1).clamp(max=self.num_tokens - 1), tokens][None]


def images(model, sampling, count, decoding="ar"):
    return decode(model, decoding_from_name(decoding), sampling, torch.arange(count)).tokens


def measure(model, sampling, tokens):
    return deviation(*token_places(model, sampling, tokens))


def true_total_variation(model, wrong, right):
    """The mean total variation between the two distributions of a token of images that are sampled with `wrong`."""
    state = torch.eye(1, model.vocab_size, dtype=torch.float64)
    total = 0.0
    for position, table in enumerate(model.table):
        distributions = [
            sampling.probabilities(table[None, None], torch.tensor([[position]]))[0].double()
            for sampling in (wrong, right)
        ]
        total += float((state @ (distributions[0] - distributions[1]).abs().sum(-1, keepdim=True) / 2).sum())
        state = state @ distributions[0]
    return total / model.num_tokens


TOP_K = Sampling(temperature=0.6, top_k=3)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("decoding", "sampling"),
    [
        *(pytest.param(name, TOP_K, marks=marks(name)) for name in EXACT),
        ("ar", Sampling()),
        ("sjd-coupled", Sampling()),
    ],
)
def test_exact_decodings_are_at_the_floor(decoding, sampling):
    model = TokenTable()
    found = measure(model, sampling, images(model, sampling, 4000, decoding))
    assert found.codes == 32_000
    assert found.total_variation < 2 * found.floor and found.chance > 1e-4 and found.impossible == 0


@pytest.mark.slow
def test_the_floor_and_the_chance_are_those_of_exact_samples():
    model = TokenTable()
    places = token_places(model, Sampling(), images(model, Sampling(), 60_000))
    found = [deviation(*parts) for parts in zip(*(values.split(250) for values in places), strict=True)]
    mean_floor = sum(each.floor for each in found) / 240
    assert sum(each.total_variation for each in found) / 240 == pytest.approx(mean_floor, rel=0.05)
    assert sum(each.chance < 0.1 for each in found) / 240 == pytest.approx(0.1, abs=0.05)
    # Points instead of intervals: the floor of a multinomial distribution, which tokens of some probability undercut.
    points = deviation(torch.rand(2000, generator=torch.Generator().manual_seed(0)), torch.zeros(2000))
    assert points.floor == pytest.approx(math.sqrt(19 / (2 * math.pi * 2000)), rel=0.05)
    assert mean_floor < 0.7 * points.floor


def test_certain_tokens_are_no_evidence():
    found = deviation(torch.zeros(50), torch.ones(50))
    assert found.total_variation == pytest.approx(0) and found.floor == pytest.approx(0)
    assert (found.chance, found.impossible) == (1, 0)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "wrong", [Sampling(temperature=0.7), Sampling(temperature=1.6), Sampling(top_k=3), Sampling(top_p=0.8)], ids=str
)
def test_a_wrong_distribution_is_found_and_never_overstated(wrong):
    model, right = TokenTable(), Sampling()
    found = measure(model, right, images(model, wrong, 8000))
    bound = true_total_variation(model, wrong, right)
    assert found.chance < 1e-9
    # Chance moves the histogram's distance by little more than the floor (McDiarmid).
    noise = found.floor + math.sqrt(math.log(1e4) / (2 * found.codes))
    assert bound / 5 < found.total_variation < bound + noise


def test_impossible_tokens_are_counted():
    model, right = TokenTable(), Sampling(top_k=2)
    tokens = images(model, Sampling(), 1000)
    before, own = token_places(model, right, tokens)
    found = deviation(before, own)
    assert found.impossible == float((own == 0).double().mean()) > 0.1
    assert found.total_variation >= found.impossible - 1 / 20
    assert (before[own == 0] > 1 - 1e-6).all()


def test_likelier_tokens_come_first():
    model = TokenTable()
    tokens = images(model, Sampling(), 6)
    before, own = token_places(model, Sampling(), tokens)
    for image, row in enumerate(tokens.tolist()):
        for position, token in enumerate(row):
            p = model.table[position, row[position - 1] if position else 0].softmax(-1).tolist()
            assert own[image, position] == pytest.approx(p[token])
            assert before[image, position] == pytest.approx(sum(each for each in p if each > p[token]), abs=1e-6)


@pytest.mark.parametrize("groups", ["plain", "guided"])
@torch.no_grad()
def test_the_distribution_is_the_one_that_a_pipeline_samples(groups):
    pipe = tiny_llamagen.text_pipeline()
    scale = 1.0 if groups == "plain" else 3.0
    prompts = ["a red heart", "tree"]
    sampling = pipe.sampling(guidance_scale=scale, top_k=1)
    tokens = pipe(prompts, guidance_scale=scale, top_k=1, output_type="latent").tokens.flatten(1)
    _, own = token_places(pipe.prepare(prompts, guidance_scale=scale).model, sampling, tokens)
    # Greedy tokens are certain given the same prompts, and impossible given others.
    assert (own == 1).all()
    other = pipe.prepare(prompts[::-1], guidance_scale=scale).model
    assert deviation(*token_places(other, sampling, tokens)).impossible > 0.1


@pytest.mark.every(2)
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_scales_of_the_model_itself_are_at_the_floor_and_those_of_a_refiner_are_not(guidance_scale):
    pipe = tiny_var.pipeline("class")
    model = pipe.prepare(class_labels=[1] * 600, guidance_scale=guidance_scale).model
    sampling, seeds = Sampling(guidance_scale=guidance_scale, temperature=3.0), torch.arange(600)
    with torch.no_grad():
        own, refined = (
            measure(model, sampling, images_of(model, sampling, seeds, name)) for name in ("next-scale", "code")
        )
    assert own.chance > 1e-3 and own.total_variation < 2 * own.floor and own.codes == 600 * model.num_tokens
    assert refined.chance < 1e-6 and refined.total_variation > 4 * refined.floor


def images_of(model, sampling, seeds, decoding):
    return decode(model, decoding_from_name(decoding), sampling, seeds).tokens
