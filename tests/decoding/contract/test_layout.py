"""Places, ranks and neighbours of layouts, against plain loops."""

import itertools
import math

import pytest
import torch
from decoding.conftest import some_order

from arimage.decoding import Layout


SHAPES = [(1, 1), (1, 5), (4, 1), (3, 4), (2, 3, 2), (1, 2, 3)]
ORDERS = ["none", "raster", "random", "spread-out"]


@pytest.fixture(params=list(itertools.product(SHAPES, ORDERS)), ids=str)
def layout(request):
    shape, order = request.param
    return Layout(shape, some_order(order, shape, 3))


def ranks_of(layout):
    """All ranks, [B, N]."""
    return torch.arange(layout.num_tokens).repeat(1 if layout.order is None else len(layout.order), 1)


def test_ranks_and_places_are_inverse(layout):
    ranks = ranks_of(layout)
    assert torch.equal(layout.ranks(layout.places(ranks)), ranks)
    assert torch.equal(layout.places(layout.ranks(ranks)), ranks)
    some = ranks.flip(1)[:, : layout.num_tokens // 2]
    assert torch.equal(layout.places(some), layout.places(ranks).flip(1)[:, : layout.num_tokens // 2])
    if layout.order is not None:
        assert torch.equal(layout.places(ranks), layout.order)


def test_values_by_rank_and_by_place(layout):
    values = torch.arange(3 * layout.num_tokens).view(3, -1)
    by_place = layout.to_places(values)
    assert by_place.shape == (3, *layout.shape)
    assert torch.equal(layout.to_ranks(by_place), values)
    places = layout.places(ranks_of(layout)).expand(3, -1)
    for image, rank in itertools.product(range(3), range(layout.num_tokens)):
        assert by_place[image].flatten()[places[image, rank]] == values[image, rank]


OFFSETS = [(0, -1), (-1, 0), (1, 1), (-1, 2), (0, 0), (-1, 0, 0), (1, -1, 1)]


def test_neighbours_are_those_of_plain_loops(layout):
    ranks, axes = ranks_of(layout), len(layout.shape)
    places = layout.places(ranks)
    coordinates = list(itertools.product(*map(range, layout.shape)))
    for offset in OFFSETS:
        if len(offset) > axes:
            continue
        actual, whole = layout.neighbours(ranks, offset), (0,) * (axes - len(offset)) + offset
        for image in range(len(ranks)):
            rank_at = {coordinates[place]: rank for rank, place in enumerate(places[image].tolist())}
            for rank, place in enumerate(places[image].tolist()):
                target = tuple(at + step for at, step in zip(coordinates[place], whole, strict=True))
                assert actual[image, rank] == rank_at.get(target, -1)


GRIDS = [((1, 2), (2, 3)), ((3, 2), (1, 4)), ((2, 2), (1, 1), (2, 3))]


@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_grids_before_the_image_come_first(grids):
    *before, shape = grids
    layout, sizes = Layout(shape, before=before), [math.prod(grid) for grid in grids]
    assert layout.grids == grids and layout.shape == shape and layout.num_tokens == sum(sizes)
    assert (layout.rows, layout.columns) == shape
    values = torch.arange(2 * layout.num_tokens).view(2, -1)
    parts = layout.parts(values)
    assert [part.shape for part in parts] == [(2, *grid) for grid in grids]
    assert torch.equal(torch.cat([part.flatten(1) for part in parts], dim=1), values)
    assert torch.equal(layout.to_ranks(*parts), values) and torch.equal(layout.to_places(values), parts[-1])


@pytest.mark.parametrize("offset", [(0, -1), (-1, 0), (1, 1), (-1, 2), (0, 0)], ids=str)
@pytest.mark.parametrize("grids", GRIDS, ids=str)
def test_neighbours_stay_in_their_grid(grids, offset):
    *before, shape = grids
    layout, expected = Layout(shape, before=before), []
    for grid in grids:
        first, alone = len(expected), Layout(grid)
        around = alone.neighbours(torch.arange(alone.num_tokens)[None], offset)[0].tolist()
        expected += [rank if rank < 0 else first + rank for rank in around]
    ranks = torch.arange(layout.num_tokens)[None]
    assert layout.neighbours(ranks, offset)[0].tolist() == expected
    assert layout.neighbours(ranks.flip(1), offset)[0].tolist() == expected[::-1]


@pytest.mark.parametrize(
    "arguments",
    [
        {"shape": (1, 2, 2), "before": [(1, 2)]},
        {"shape": (2, 2), "before": [(1, 2)], "order": torch.arange(6)[None]},
        {"shape": (2, 2), "before": [(1, 2, 2)]},
        {"shape": (2, 2), "before": [(0, 2)]},
    ],
    ids=["video", "order", "frames before", "empty"],
)
def test_other_grids_before_an_image_are_refused(arguments):
    with pytest.raises(ValueError, match="before"):
        Layout(**arguments)


@pytest.mark.parametrize("shape", [(), (4,), (0, 3), (2, -1), (1, 2, 3, 4)], ids=str)
def test_shapes_without_rows_and_columns_are_refused(shape):
    with pytest.raises(ValueError, match="shape"):
        Layout(shape)


@pytest.mark.parametrize(
    "order",
    [[[0, 1, 2]], [[0, 1, 2, 2]], [[0, 1, 2, 4]], [[-1, 0, 1, 2]], [0, 1, 2, 3], [[0, 1, 2, 3], [0, 0, 1, 2]]],
    ids=str,
)
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ValueError, match="order"):
        Layout((2, 2), torch.tensor(order))


def test_unknown_tokens_are_filled_with_known_ones_near_them(layout):
    tokens = torch.full((3, layout.num_tokens), -1)
    assert torch.equal(layout.fill(tokens), tokens)
    tokens[:, :1] = 7
    filled = layout.parts(layout.fill(tokens))
    known = [bool((part >= 0).any()) for part in layout.parts(tokens)]
    for part, any_known in zip(filled, known, strict=True):
        assert torch.equal(part, torch.full_like(part, 7 if any_known else -1))
    everything = torch.arange(3 * layout.num_tokens).view(3, -1)
    assert torch.equal(layout.fill(everything), everything)


def test_known_tokens_grow_along_the_columns_and_then_along_the_rows():
    tokens = torch.tensor([[4, -1, -1, -1, 9, -1], [-1, -1, -1, -1, -1, 2]])
    assert Layout((2, 3)).fill(tokens).view(2, 2, 3).tolist() == [[[4, 9, 9], [4, 9, 9]], [[2, 2, 2], [2, 2, 2]]]
