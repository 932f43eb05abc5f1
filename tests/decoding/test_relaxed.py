"""Relaxed verification: nothing changes at the neutral settings, and elsewhere the distribution is the one that is
claimed."""

import math

import pytest
import torch
from decoding.pairwise import each_once
from decoding.test_exactness import assert_follows

from arimage.decoding import (
    ExactAcceptance,
    GroupAcceptance,
    NeighbourAcceptance,
    Sampling,
    SpeculativeJacobiDecoding,
    decode,
    decoding_from_name,
)
from arimage.kernels.neighbours import nearest_neighbours


def jacobi(window=3, **settings):
    return SpeculativeJacobiDecoding(window=window, **settings)


NEUTRAL = {
    "group of one": {"acceptance": GroupAcceptance(size=1, max_probability_gap=1.0, max_distance=9.0)},
    "no probability gap": {"acceptance": GroupAcceptance(max_probability_gap=0.0, max_distance=9.0)},
    "no distance": {"acceptance": GroupAcceptance(max_distance=0.0)},
    "delta 0": {"acceptance": NeighbourAcceptance(delta=0.0)},
    "relative delta 0": {"acceptance": NeighbourAcceptance(delta=0.0, relative=True)},
}
STRONG = {
    "relax": {"relax": 2.0},
    "group": {"acceptance": GroupAcceptance(size=3, max_probability_gap=1.0, max_distance=9.0)},
    "delta": {"acceptance": NeighbourAcceptance(1000, delta=0.2)},
    "relative delta": {"acceptance": NeighbourAcceptance(1000, delta=1.0, relative=True)},
    "relax and relative delta": {"acceptance": NeighbourAcceptance(1000, delta=0.5, relative=True), "relax": 1.5},
    "reuse": {"reuse": 0.3},
    "reuse, independent": {"reuse": 0.3, "refresh": "independent"},
}
SAMPLINGS = {
    "plain": Sampling(),
    "everything": Sampling(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9, guided_tokens=3),
    "allowed": Sampling(guidance_scale=2.0, allowed=torch.tensor([True, False, True])),
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("neutral", "refresh", "sampling"),
    [
        tuple(choice.values())
        for choice in each_once(
            {
                "neutral": list(NEUTRAL),
                "refresh": ["independent", "coupled", "gumbel"],
                "sampling": list(SAMPLINGS),
            }
        )
    ],
)
def test_neutral_settings_give_the_images_of_the_exact_method(table_model, neutral, refresh, sampling):
    relaxed = jacobi(refresh=refresh, **NEUTRAL[neutral])
    assert relaxed.exact
    model = table_model(branches=2)
    runs = [
        decode(model, decoding, SAMPLINGS[sampling], torch.arange(2000))
        for decoding in (relaxed, jacobi(refresh=refresh))
    ]
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    assert torch.equal(runs[0].accepted, runs[1].accepted)


def test_reuse_of_what_the_coupling_keeps_anyway_changes_nothing(table_model):
    model = table_model(grid=(1, 7), vocab_size=2)
    exact, kept, more = (
        decode(model, jacobi(7, reuse=reuse), Sampling(), torch.arange(2000)).tokens for reuse in (None, 1.0, 0.3)
    )
    assert torch.equal(exact, kept) and not torch.equal(exact, more)


# The distribution of one token, from the definitions and one token at a time.


def keep_rate(acceptance, x, p, q, codebook):
    """How often x is kept, before `relax`; more than 1 is always."""
    p, q = p.tolist(), q.tolist()
    if p[x] == 0:
        return 0.0
    exact = p[x] / q[x] if q[x] > 0 else math.inf
    distances = (codebook - codebook[x]).norm(dim=-1).tolist()
    if isinstance(acceptance, GroupAcceptance):
        ranking = sorted((token for token in range(len(p)) if p[token] > 0), key=lambda token: p[token])
        rank, side = ranking.index(x), acceptance.size // 2
        group = [
            token
            for token in ranking[max(0, rank - side) : rank + side + 1]
            if token == x
            or (abs(p[token] - p[x]) < acceptance.max_probability_gap and distances[token] < acceptance.max_distance)
        ]
        q_group = sum(q[token] for token in group)
        return max(exact, sum(p[token] for token in group) / q_group if q_group > 0 else math.inf)
    if isinstance(acceptance, NeighbourAcceptance):
        bound = acceptance.delta * (p[x] if acceptance.relative else 1.0)
        mass = 0.0
        for token in sorted(set(range(len(p))) - {x}, key=lambda token: distances[token])[: acceptance.neighbours]:
            if mass + p[token] > bound:
                break
            mass += p[token]
        return (p[x] + mass) / q[x] if q[x] > 0 else math.inf
    return exact


def keep_rates(acceptance, relax, p, q, codebook):
    rates = [min(1.0, relax * keep_rate(acceptance, x, p, q, codebook)) for x in range(len(p))]
    return torch.tensor(rates, dtype=torch.float64)


def relaxed_distribution(rates, p, q, residual=None):
    """The distribution of a token drafted from q, kept at `rates`, else sampled from a residual distribution, by
    default norm(max(p - q, 0))."""
    if residual is None:
        residual = (p - q).clamp(min=0)
        residual = (residual if residual.sum() > 0 else p) / residual.sum().clamp(min=1e-30)
    return q * rates + (1 - (q * rates).sum()) * residual


def random_case(seed, size=9):
    """Distributions p and q, some tokens excluded, and a codebook; distances differ."""
    generator = torch.Generator().manual_seed(seed)
    distributions = torch.empty(2, size, dtype=torch.float64).exponential_(generator=generator) ** 1.5
    distributions[torch.rand(2, size, generator=generator) < 0.2] = 0
    return *(distributions / distributions.sum(-1, keepdim=True)), torch.randn(size, 2, generator=generator)


class Codebook:
    """All of a model that an acceptance asks for."""

    def __init__(self, codebook):
        self.codebook, self.network = codebook, self


TESTS = [
    (ExactAcceptance(), 1.0),
    (ExactAcceptance(), 1.3),
    *(
        (GroupAcceptance(size, gap, distance), 1.0)
        for size in (1, 2, 4, 14, 99)
        for gap, distance in ((1, 9), (0.1, 1.5))
    ),
    (GroupAcceptance(4, 1, 9), 1.3),
    *((NeighbourAcceptance(count, delta), 1.0) for count in (1, 3, 1000) for delta in (0.0, 0.1, 0.4)),
    *((NeighbourAcceptance(1000, delta, relative=True), 1.0) for delta in (0.0, 0.5, 2.0)),
    (NeighbourAcceptance(1000, 0.5, relative=True), 1.3),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("acceptance", "relax"), TESTS, ids=str)
def test_a_draft_is_kept_as_often_as_defined(acceptance, relax, seed):
    p, q, codebook = random_case(seed)
    steps, size = 4000, len(p)
    uniform = ((torch.arange(steps) + 0.5) / steps)[:, None].expand(-1, size)
    distributions = (distribution.float().expand(steps, size, -1) for distribution in (p, q))
    kept = acceptance.bind(Codebook(codebook))(*distributions, torch.arange(size).expand(steps, -1), uniform / relax)
    torch.testing.assert_close(
        kept.double().mean(0), keep_rates(acceptance, relax, p, q, codebook), atol=1.01 / steps, rtol=0
    )


# The distribution of an image.


def joint_of(tokens, vocab_size):
    powers = vocab_size ** torch.arange(tokens.shape[1] - 1, -1, -1)
    return torch.bincount((tokens * powers).sum(1), minlength=vocab_size ** tokens.shape[1]).double() / len(tokens)


def distance_and_limit(tokens, joint, vocab_size):
    """Total variation from `joint`, and what as many samples from it exceed one time in 10,000 (McDiarmid)."""
    distance = (joint_of(tokens, vocab_size) - joint).abs().sum() / 2
    floor = (2 * joint * (1 - joint) / (math.pi * len(tokens))).sqrt().sum() / 2
    return float(distance), float(floor + math.sqrt(math.log(1e4) / (2 * len(tokens))))


def joint_of_three(model, sampling, decoding):
    """Probabilities [V ** 3] of images of three tokens by a relaxed `decoding` with a window of two.

    Both drafts are fresh at first, so where the first is accepted all follow the model. Where it is not, the second is
    sampled again given the rejected draft, and a relaxed test verifies it in the next step.
    """
    size = model.vocab_size
    first, second, third = (
        sampling.probabilities(table[:, None], torch.full((1, table.shape[1]), rank))[0].double()
        for rank, table in enumerate(model.tables)
    )
    u = sampling.uniform(torch.zeros(1, 1, dtype=torch.long), size)[0, 0].double()
    settings = decoding.acceptance, decoding.relax
    joint = torch.zeros(size, size, size, dtype=torch.float64)
    for x in range(size):
        p = second[x]
        third_of = third.view(size, size, size)[x]
        joint[x] += torch.minimum(p, u)[:, None] * third_of
        residual = (p - u).clamp(min=0)
        for draft in range(size):
            chance = (u - p).clamp(min=0)[draft] * residual / residual.sum().clamp(min=1e-30)
            q = third_of[draft]
            rows = [relaxed_distribution(keep_rates(*settings, row, q, model.codebook), row, q) for row in third_of]
            joint[x] += chance[:, None] * torch.stack(rows)
        joint[x] *= first[0, x]
    return joint.flatten() / joint.sum()


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("strong", "sampling", "refresh"),
    [
        tuple(choice.values())
        for choice in each_once(
            {
                "strong": [name for name in STRONG if "reuse" not in name],
                "sampling": list(SAMPLINGS),
                "refresh": ["independent", "coupled", "gumbel"],
            }
        )
    ],
)
def test_images_of_three_tokens_follow_the_relaxed_distribution(table_model, strong, sampling, refresh):
    sampling, decoding = SAMPLINGS[sampling], jacobi(window=2, **STRONG[strong], refresh=refresh)
    model = table_model(grid=(1, 3), branches=2, sharpness=2.0)
    tokens = decode(model, decoding, sampling, torch.arange(15_000)).tokens
    assert_follows(tokens, joint_of_three(model, sampling, decoding), 3)


def test_a_draft_is_fresh_until_it_is_evaluated(table_model, monkeypatch):
    model, asked = table_model(grid=(1, 8), vocab_size=2), []
    monkeypatch.setattr(
        NeighbourAcceptance, "bind", lambda *_: lambda p, q, x, uniform: asked.append(1) or torch.ones_like(x).bool()
    )
    decoding = SpeculativeJacobiDecoding(3, acceptance=NeighbourAcceptance(delta=1.0))
    state = decoding.start(model, Sampling(), torch.arange(500))
    assert state.fresh.all()
    while not state.finished.all():
        cursor, positions, fresh = (values.clone() for values in (state.cursor, state.positions, state.fresh))
        decoding.step(state)
        accepted = state.cursor - cursor
        # An evaluated draft always passes this test, so a step is cut short at a fresh draft only.
        cut = (accepted < 3) & (state.cursor < 8)
        assert fresh[(positions == state.cursor[:, None] - 1) & cut[:, None]].all()
        # The slots of the decided drafts.
        assert torch.equal(state.fresh, positions < state.cursor[:, None])
    assert asked


def promised(decoding, num_tokens, vocab_size):
    """The total variation of an image that the docstrings promise not to exceed, whatever the model."""
    acceptance = decoding.acceptance
    if decoding.reuse is not None or isinstance(acceptance, GroupAcceptance):
        return 1.0
    if isinstance(acceptance, ExactAcceptance):
        token = 1 - 1 / decoding.relax
    elif acceptance.relative:
        token = 1 - 1 / (decoding.relax * (1 + acceptance.delta))
    else:
        token = (vocab_size - 1) * acceptance.delta
    return 1 - (1 - token) ** (num_tokens - 1)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "strong",
    [pytest.param(s, marks=pytest.mark.slow) if "reuse" in s or "relative" in s else s for s in STRONG],
)
def test_images_of_a_strong_setting_are_off_but_by_no_more_than_promised(table_model, strong):
    decoding = jacobi(7, **STRONG[strong])
    # Reuse changes a draft only after several steps.
    sizes = {"grid": (1, 7), "vocab_size": 2} if decoding.reuse else {"grid": (1, 5), "vocab_size": 3}
    model = table_model(**sizes)
    # So many that the effect of the setting is more than chance.
    seeds = torch.arange(30_000 if strong in ("relative delta", "reuse", "reuse, independent") else 15_000)
    tokens = decode(model, decoding, Sampling(), seeds).tokens
    distance, limit = distance_and_limit(tokens, model.joint(Sampling()), model.vocab_size)
    assert limit < distance < promised(decoding, model.num_tokens, model.vocab_size) + limit


def test_a_table_of_neighbours_is_made_once_per_codebook(table_model, monkeypatch):
    made, model = [], table_model(vocab_size=20, grid=(1, 2))
    monkeypatch.setattr(
        "arimage.decoding.acceptance.nearest_neighbours",
        lambda *inputs: made.append(inputs[1]) or nearest_neighbours(*inputs),
    )
    for preset in ("lantern", "lantern", "lantern++", "eagle-lantern"):
        decode(model, decoding_from_name(preset), Sampling(), torch.arange(2))
    # One for the share of the codebook, one for ten neighbours.
    assert made == [1, 10]
    decode(model, decoding_from_name("lantern", window="auto"), Sampling(), torch.arange(2))
    assert made == [1, 10]
    model.codebook = model.codebook.flip(0) ** 2
    decode(model, decoding_from_name("lantern"), Sampling(), torch.arange(2))
    assert made == [1, 10, 1]
    model.codebook.mul_(-1).add_(torch.rand(20, 1))
    decode(model, decoding_from_name("lantern"), Sampling(), torch.arange(2))
    assert made == [1, 10, 1, 1]


@pytest.mark.parametrize(("size", "share"), [(20, 1), (1024, 62), (16384, 1000)])
def test_neighbours_are_a_share_of_the_codebook_by_default(size, share, monkeypatch):
    counts = []
    monkeypatch.setattr(
        "arimage.decoding.acceptance.nearest_neighbours",
        lambda codebook, count: counts.append(count) or torch.zeros(size, count).int(),
    )
    NeighbourAcceptance().bind(Codebook(torch.rand(size, 2)))
    assert counts == [share]


@pytest.mark.parametrize("preset", ["gsd", "lantern", "lantern++"])
def test_a_model_without_codebook_is_refused(table_model, preset):
    model = table_model()
    model.codebook = None
    with pytest.raises(ValueError, match="codebook"):
        decode(model, decoding_from_name(preset), Sampling(), torch.arange(2))
