"""Windows of couplings: the whole window at once equals every place by itself."""

import torch

from arimage.decoding.coupling import couple, couple_window


def random_laws(*shape, seed=0, zeros=0.0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.empty(shape).exponential_(generator=generator) ** 2
    weights = weights.masked_fill(torch.rand(shape, generator=generator) < zeros, 0)
    weights[..., 0] += (weights.sum(-1) == 0).float()
    return weights / weights.sum(-1, keepdim=True)


def window(batch, length, size, seed=0, zeros=0.0):
    """p, q, x, noise and live of a window whose drafts are often kept."""
    generator = torch.Generator().manual_seed(seed)
    p = random_laws(batch, length, size, seed=seed, zeros=zeros)
    q = 0.8 * p + 0.2 * random_laws(batch, length, size, seed=seed + 1, zeros=zeros)
    x = q.flatten(0, 1).multinomial(1, generator=generator).view(batch, length)
    noise = torch.rand(batch, length, 2, generator=generator)
    return p, q, x, noise, torch.rand(batch, length, generator=generator) < 0.9


def test_a_window_is_its_places_and_counts_up_to_the_first_that_is_rejected_or_not_live():
    p, q, x, noise, live = window(80, 4, 9)
    y, kept, leading = couple_window(p, q, x, noise, live)
    for b in range(80):
        count = 0
        for j in range(4):
            alone = couple(p[b, j], q[b, j], x[b, j], noise[b, j])
            assert alone[0] == y[b, j] and alone[1] == kept[b, j]
            if count == j and alone[1] and live[b, j]:
                count += 1
        assert leading[b] == count
    assert set(leading.tolist()) == set(range(5))
