"""Orders by name, against plain loops."""

import card
import pytest
import torch

from arimage.decoding.contract.noise import Purpose, uniforms
from arimage.decoding.contract.orders import order_of


SEEDS = torch.tensor([0, 1, -1, 2**40])
SHAPE = (6, 5)
N = SHAPE[0] * SHAPE[1]
GROUPS = [1, 2, 4, 6, 8, 9]


def at(place):
    return divmod(place, SHAPE[1])


def squared(a, b):
    return (at(a)[0] - at(b)[0]) ** 2 + (at(a)[1] - at(b)[1]) ** 2


@pytest.mark.parametrize("name", ["random", "farthest", "locality"])
def test_every_seed_has_a_permutation_of_its_own(name):
    order = order_of(name, SHAPE, SEEDS, GROUPS)
    assert order.dtype == torch.int64 and order.shape == (len(SEEDS), N)
    assert torch.equal(order.sort(1).values, torch.arange(N).expand(len(SEEDS), -1))
    assert len(order.unique(dim=0)) == len(SEEDS)
    for row, seed in enumerate(SEEDS):
        assert torch.equal(order_of(name, SHAPE, seed[None], GROUPS)[0], order[row])


def test_the_raster_order_is_none():
    assert order_of("raster", SHAPE, SEEDS) is None


def test_what_is_known_comes_first_and_the_rest_is_far_from_it():
    known = torch.rand(len(SEEDS), N, generator=torch.Generator().manual_seed(0)) < 0.3
    for name in ("farthest", "locality"):
        for order, kept in zip(order_of(name, SHAPE, SEEDS, GROUPS, known).tolist(), known, strict=True):
            count = int(kept.sum())
            assert sorted(order) == list(range(N)) and sorted(order[:count]) == kept.nonzero().flatten().tolist()
            for rank in range(count, N if name == "farthest" else 0):
                distance = [min(squared(place, other) for other in order[:rank]) for place in range(N)]
                assert distance[order[rank]] == max(distance)


def spread(noise, sizes, known):
    """The definition of "farthest" and "locality", one operator after another."""
    rows, columns = SHAPE
    close, largest = max(rows // 8, 1), float(rows**2 + columns**2)
    place = torch.arange(N)
    down, right = ((part - part[:, None]).abs() for part in (place // columns, place % columns))
    far, distance = torch.maximum(down, right), (down**2 + right**2).float()
    weight = torch.where(far == 1, distance.rsqrt(), 0.0)
    preference = 0.5 * noise + 9 * largest * known.float()
    neighbours, picks = torch.zeros_like(noise), []
    for size in sizes:
        nearest = torch.full_like(noise, largest)
        crowded, free = largest * (2 + neighbours), neighbours >= 1
        for _ in range(size):
            pick = (torch.where(free, crowded, nearest) + preference).argmax(1)
            picks.append(pick)
            preference.scatter_(1, pick[:, None], -torch.inf)
            nearest = torch.minimum(nearest, distance[pick])
            free &= far[pick] > close
            neighbours += weight[pick]
    return torch.stack(picks, dim=1)


@pytest.mark.parametrize(("name", "sizes"), [("farthest", [N]), ("locality", GROUPS)])
def test_orders_are_those_of_the_definition_bit_by_bit(name, sizes):
    seeds = torch.arange(200) - 100
    noise = uniforms(seeds, torch.arange(N).expand(200, -1), None, Purpose.ORDER, 1)[..., 0]
    known = torch.rand(200, N, generator=torch.Generator().manual_seed(0)) < 0.2
    for given in (torch.zeros_like(known), known):
        assert torch.equal(order_of(name, SHAPE, seeds, GROUPS, given), spread(noise, sizes, given))
    assert torch.equal(order_of(name, SHAPE, seeds, GROUPS), spread(noise, sizes, torch.zeros_like(known)))


@pytest.mark.parametrize("name", ["random", "farthest", "locality"])
def test_the_host_waits_at_most_once_for_the_device(name):
    pytest.importorskip("triton", reason="triton is not installed, and its kernels are what runs on a card")
    with card.card() as device:
        order = order_of(name, SHAPE, card.OnCard(SEEDS), GROUPS)
        waits = device.waits.total()
    assert waits <= 1 and torch.equal(order.elem, order_of(name, SHAPE, SEEDS, GROUPS))
