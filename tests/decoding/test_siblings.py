"""Several drafts for one position: the distribution of what comes out, enumerated rather than sampled."""

import itertools

import pytest
import torch

from arimage.kernels.coupling import couple, sample
from arimage.kernels.siblings import couple_siblings, sample_siblings


LAST = 1 - 2.0**-53  # the largest uniform number there is


def distributions(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def random_distributions(count, size, seed, zeros=0.0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(count, size, dtype=torch.float64).exponential_(generator=generator) ** 2
    weights = weights.masked_fill(torch.rand(count, size, generator=generator) < zeros, 0)
    weights[weights.sum(-1) == 0, 0] = 1
    return weights / weights.sum(-1, keepdim=True)


def without_replacement(q, count):
    """Every sequence [S, count] of drafts and its probability [S]; -1 once `q` is exhausted."""
    sequences = [((), 1.0, q)]
    for _ in range(count):
        longer = []
        for tokens, chance, left in sequences:
            if left.sum() == 0:
                longer.append(((*tokens, -1), chance, left))
            for token in left.nonzero().flatten().tolist():
                rest = left.clone()
                rest[token] = 0
                longer.append(((*tokens, token), chance * float(left[token] / left.sum()), rest))
        sequences = longer
    return torch.tensor([tokens for tokens, _, _ in sequences]), distributions([chance for _, chance, _ in sequences])[
        0
    ]


def share_below(condition, shape):
    """How much of [0, 1) fulfils `condition`, which holds up to some number and not beyond."""
    low, high = torch.zeros(shape, dtype=torch.float64), torch.ones(shape, dtype=torch.float64)
    for _ in range(40):
        middle = (low + high) / 2
        holds = condition(middle)
        low, high = torch.where(holds, middle, low), torch.where(holds, high, middle)
    return low


def output_distribution(p, q, count, verify=couple_siblings, drafts_from=None, chosen=None):
    """The distribution [V] of y if `count` drafts are sampled from `drafts_from` (by default `q`) without replacement,
    or are the `chosen` ones."""
    x, chance = without_replacement(q if drafts_from is None else drafts_from, count)
    if chosen is not None:
        x, chance = torch.tensor([chosen]), torch.ones(1, dtype=torch.float64)
    size = len(p)
    p, q = p.expand(len(x), -1), q.expand(len(x), -1)
    distribution = torch.zeros(size, dtype=torch.float64)
    for k in range(count):

        def accepts(uniform, k=k):
            noise = torch.full((len(x), count + 1), LAST, dtype=torch.float64)
            noise[:, k] = uniform
            return verify(p, q, x, noise)[1] == k

        share = share_below(accepts, len(x))
        distribution.index_add_(0, x[:, k].clamp(min=0), chance * share)
        chance = chance * (1 - share)

    def at_most(uniform):
        noise = torch.full((*uniform.shape, count + 1), LAST, dtype=torch.float64)
        noise[..., -1] = uniform
        arguments = (value[:, None].expand(-1, size, -1) for value in (p, q, x))
        y, which = verify(*arguments, noise)
        return torch.where(which < 0, y, 0) <= torch.arange(size)

    return distribution + chance @ share_below(at_most, (len(x), size)).diff(dim=1, prepend=torch.zeros(len(x), 1))


PAIRS = {
    "equal": distributions([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),
    "far": distributions([0.9, 0.1, 0.0], [0.1, 0.1, 0.8]),
    "disjoint": distributions([0.0, 0.0, 0.4, 0.6], [0.7, 0.3, 0.0, 0.0]),
    "draft one-hot": distributions([0.2, 0.5, 0.3], [0.0, 1.0, 0.0]),
    "draft uniform": distributions([0.7, 0.2, 0.1, 0.0], [0.25] * 4),
    "target one-hot": distributions([0.0, 0.0, 1.0], [0.2, 0.5, 0.3]),
    "both one-hot, apart": distributions([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]),
    **{f"random {seed}": random_distributions(2, 5, seed, zeros=0.25) for seed in range(4)},
}


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("pair", "tokens"),
    list(zip(PAIRS, itertools.cycle([(2,), (1, 0), (0, 2, 1), (0, -1, 1), (-1, -1)]), strict=False)),
)
def test_chosen_drafts_become_a_sample_of_the_target(pair, tokens):
    p = PAIRS[pair][0]

    def verify(p, q, x, noise):
        return couple_siblings(p, None, x, noise)

    assert (output_distribution(p, p, len(tokens), verify, chosen=tokens) - p).abs().sum() / 2 < 1e-9


@pytest.mark.every(6)
@pytest.mark.parametrize(("pair", "count"), [*((pair, 3) for pair in PAIRS), *(("random 0", n) for n in (1, 2, 4))])
def test_drafts_without_replacement_become_a_sample_of_the_target(pair, count):
    p, q = PAIRS[pair]
    assert (output_distribution(p, q, count) - p).abs().sum() / 2 < 1e-9


def verify_without_residual(p, q, x, noise):
    """Tries every draft against the first target."""
    y, which = couple_siblings(p, q, x, noise)
    for k in range(x.shape[-1] - 1, -1, -1):
        kept = couple(p, q, x[..., k].clamp(min=0), noise[..., [k, -1]])[1] & (x[..., k] >= 0)
        y, which = torch.where(kept, x[..., k], y), torch.where(kept, k, which)
    return y, which


def verify_with_replacement(p, q, x, noise):
    """Forgets that the drafts tried before cannot come again."""
    which = torch.full_like(x[..., 0], -1)
    for k in range(x.shape[-1]):
        sampled, kept = couple(p, q, x[..., k].clamp(min=0), noise[..., [k, -1]])
        which = torch.where((which < 0) & kept & (x[..., k] >= 0), k, which)
        residual = (p - q).clamp(min=0)
        p = torch.where(residual.sum(-1, keepdim=True) > 0, residual / residual.sum(-1, keepdim=True), p)
    chosen = x.gather(-1, which.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(which < 0, sample(p, noise[..., -1]), chosen), which


FLAWS = {
    "drafts are sampled from the residual but verified as samples of another distribution": {
        "drafts_from": "residual"
    },
    "every draft is tried against the first target": {"verify": verify_without_residual},
    "drafts are verified as sampled with replacement": {"verify": verify_with_replacement},
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_the_check_rejects_a_verification_in_which(flaw):
    p, q = random_distributions(2, 5, 3)
    settings = dict(FLAWS[flaw])
    if settings.pop("drafts_from", None):
        settings["drafts_from"] = (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()
    assert (output_distribution(p, q, 2, **settings) - p).abs().sum() / 2 > 1e-3


def test_one_draft_is_the_coupling_of_a_pair():
    p, q = random_distributions(2, 1000 * 6, 0).float().view(2, 1000, 6)
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(1000, 2, generator=generator)
    x = sample(q, torch.rand(1000, generator=generator))
    y, which = couple_siblings(p, q, x[:, None], noise)
    expected, kept = couple(p, q, x, noise)
    assert torch.equal(which == 0, kept) and torch.equal(y[kept], expected[kept])
    assert ((p - q).gather(-1, y[~kept, None].new_zeros(1000, 1) + y[:, None])[~kept] > 0).all()


def test_siblings_are_sampled_without_replacement():
    q = distributions([0.5, 0.3, 0.0, 0.2])[0]
    steps = 60
    grid = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    noise = torch.cartesian_prod(grid, grid)
    sampled = sample_siblings(q.expand(len(noise), -1), noise)
    sequences, chance = without_replacement(q, 2)
    for tokens, expected in zip(sequences, chance, strict=True):
        assert abs((sampled == tokens).all(1).double().mean() - expected) < 2 / steps
