"""`sample` and `couple` have the distributions they claim, enumerated rather than sampled."""

import pytest
import torch

from arimage.kernels.coupling import couple, sample


LAST = 1 - 2.0**-24  # the largest uniform number there is


def distributions(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def random_distributions(count, size, seed=0, zeros=0.0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(count, size).exponential_(generator=generator) ** 2
    weights = weights.masked_fill(torch.rand(count, size, generator=generator) < zeros, 0)
    weights[weights.sum(-1) == 0, 0] = 1
    return weights / weights.sum(-1, keepdim=True)


def midpoints(steps):
    return (torch.arange(steps) + 0.5) / steps


def output_distribution(p, q, steps=2000):
    """The distribution of y if x ~ q, and how often x is kept, by summing over x and over grids of the two numbers.

    What is sampled after a rejection does not depend on the first number, so two grids of one dimension do.
    """
    size = len(p)
    distribution, kept_mass = torch.zeros(size, dtype=torch.float64), 0.0
    for x in (q > 0).nonzero().flatten():
        first = torch.stack([midpoints(steps), torch.full((steps,), 0.5)], dim=-1)
        second = torch.stack([torch.full((steps,), LAST), midpoints(steps)], dim=-1)
        arguments = p.expand(steps, -1), q.expand(steps, -1), x.expand(steps)
        y, kept = couple(*arguments, first)
        assert (y[kept] == x).all()
        rate = kept.double().mean()
        distribution[x] += q[x].double() * rate
        kept_mass += float(q[x].double() * rate)
        y, kept = couple(*arguments, second)
        if not kept.all():
            distribution += q[x].double() * (1 - rate) * torch.bincount(y, minlength=size).double() / steps
    return distribution, kept_mass


PAIRS = {
    "equal": distributions([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),
    "near": distributions([0.3, 0.4, 0.3], [0.2, 0.5, 0.3]),
    "far": distributions([0.9, 0.1, 0.0], [0.1, 0.1, 0.8]),
    "disjoint": distributions([0.0, 0.4, 0.6], [1.0, 0.0, 0.0]),
    "draft one-hot": distributions([0.2, 0.5, 0.3], [0.0, 1.0, 0.0]),
    "draft uniform": distributions([0.7, 0.2, 0.1, 0.0], [0.25] * 4),
    "target one-hot": distributions([0.0, 0.0, 1.0], [0.2, 0.5, 0.3]),
    "both one-hot, equal": distributions([0.0, 1.0, 0.0], [0.0, 1.0, 0.0]),
    "both one-hot, apart": distributions([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]),
    "draft narrower": distributions([0.2, 0.2, 0.2, 0.4], [0.0, 0.0, 0.5, 0.5]),
    "one code": distributions([1.0], [1.0]),
    **{f"random {seed}": random_distributions(2, 6, seed, zeros=0.3) for seed in range(6)},
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_draft_of_one_distribution_becomes_a_sample_of_the_other_and_stays_as_often_as_it_can(pair):
    p, q = PAIRS[pair]
    distribution, kept = output_distribution(p, q)
    assert (distribution - p).abs().max() < 1e-3
    assert abs(kept - torch.minimum(p, q).sum()) < 1e-3
    assert (distribution[p == 0] == 0).all()


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("keep", [0.0, 0.5, LAST])
@pytest.mark.parametrize("choose", [0.0, 0.5, LAST])
def test_what_comes_out_may_always_be_sampled(pair, keep, choose):
    p, q = PAIRS[pair]
    x = torch.arange(len(p))  # every token, those that q cannot sample too
    y, kept = couple(p.expand(len(p), -1), q.expand(len(p), -1), x, torch.tensor([keep, choose]).expand(len(p), 2))
    assert (p[y] > 0).all()
    assert torch.equal(y[kept], x[kept])
    residual = (p - q).clamp(min=0)
    if residual.sum() > 0:
        assert (residual[y[~kept]] > 0).all()


def test_without_a_residual_the_sample_is_from_the_target_itself():
    # Code 2 was never to be drafted, so it is rejected; p - q is nowhere positive.
    p = distributions([0.25, 0.75, 0.0]).expand(2000, -1)
    noise = torch.stack([torch.full((2000,), 0.5), midpoints(2000)], dim=-1)
    y, kept = couple(p, p.clone(), torch.full((2000,), 2), noise)
    assert not kept.any()
    assert torch.bincount(y, minlength=3).tolist() == [500, 1500, 0]


def test_a_draft_that_its_distribution_excludes_is_kept_where_the_target_allows_it():
    p, q = distributions([0.5, 0.5, 0.0], [0.0, 1.0, 0.0])
    y, kept = couple(p.expand(2, -1), q.expand(2, -1), torch.tensor([0, 2]), torch.tensor([[LAST, 0.0]] * 2))
    assert kept.tolist() == [True, False] and y.tolist() == [0, 0]


@pytest.mark.parametrize("scale", [1.0, 3.0, 1e-6, 1e-37, 1e6])
def test_sample_follows_weights_of_any_sum(scale):
    weights = distributions([0.0, 0.125, 0.5, 0.0, 0.375, 0.0]) * scale
    tokens = sample(weights[0].expand(8000, -1), midpoints(8000))
    assert torch.bincount(tokens, minlength=6).tolist() == [0, 1000, 4000, 0, 3000, 0]


@pytest.mark.parametrize("uniform", [0.0, 2.0**-24, 0.5, LAST])
@pytest.mark.parametrize("size", [1, 2, 1000, pytest.param(65536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-37, 1e-44], ids=lambda scale: f"sum {scale:g}")
def test_sample_never_gives_a_token_without_weight(size, uniform, scale):
    weights = torch.cat([random_distributions(20, size, seed, zeros) for seed, zeros in enumerate((0.0, 0.5, 0.999))])
    weights[::2, : size // 3] = 0
    weights[::3, 2 * size // 3 :] = 0
    weights[weights.sum(-1) == 0, size // 2] = 1.0
    weights = weights * scale
    weights[weights.sum(-1) == 0, size // 2] = scale
    tokens = sample(weights, torch.full((len(weights),), uniform))
    assert (weights.gather(1, tokens[:, None]) > 0).all()
