"""Neighbours are the nearest, and the mass of their longest prefix stays within its bound."""

import pytest
import torch

from arimage.kernels import neighbours as operation
from arimage.kernels.neighbours import nearest_neighbours, neighbour_mass


def distributions(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(2).softmax(-1)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 24])
def test_neighbours_are_the_nearest_others_in_order(at_once, monkeypatch):
    monkeypatch.setattr(operation, "_DISTANCES", at_once)
    codebook = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
    table = nearest_neighbours(codebook, 7)
    assert table.shape == (37, 7) and table.dtype == torch.int32
    for token, row in enumerate(codebook.double()):
        distance = (codebook.double() - row).norm(dim=-1).tolist()
        others = sorted((other for other in range(37) if other != token), key=distance.__getitem__)
        assert table[token].tolist() == others[:7]


def test_a_token_is_not_its_own_neighbour_where_another_is_equal_to_it():
    table = nearest_neighbours(torch.tensor([[1.0], [1.0], [5.0], [1.0]]), 2)
    assert [sorted(table[token].tolist()) for token in (0, 1, 3)] == [[1, 3], [0, 3], [0, 1]]


def test_close_tokens_far_from_the_origin_are_distinguished():
    codebook = torch.tensor([[1000.0], [1000.25], [1000.125], [999.9375]])
    assert nearest_neighbours(codebook, 3)[0].tolist() == [3, 2, 1]


@pytest.mark.parametrize("count", [0, 4, 9])
def test_more_neighbours_than_there_are_others_are_refused(count):
    with pytest.raises(ValueError, match=f"count is {count}: .* 1 to 3"):
        nearest_neighbours(torch.randn(4, 2), count)


def naive_mass(p, row, bound):
    mass = 0.0
    for neighbour in row:
        if mass + float(p[neighbour]) > bound:
            break
        mass += float(p[neighbour])
    return mass


@pytest.mark.parametrize("rule", ["delta", "lambda"])
def test_mass_is_that_of_the_longest_prefix_within_the_bound(rule):
    generator = torch.Generator().manual_seed(3)
    p = distributions(5, 4, 30)
    x = torch.randint(30, (5, 4), generator=generator)
    table = nearest_neighbours(torch.randn(30, 3, generator=generator), 11)
    p_x = p.gather(-1, x[..., None])[..., 0]
    bound = torch.full((5, 4), 0.2) if rule == "delta" else 1.5 * p_x
    mass = neighbour_mass(p, x, table, bound)
    for b in range(5):
        for j in range(4):
            assert mass[b, j].item() == pytest.approx(
                naive_mass(p[b, j], table[x[b, j]].tolist(), bound[b, j]), abs=1e-5
            )
    assert mass.unique().numel() > 10


@pytest.mark.parametrize(("bound", "mass"), [(0.0, 0.0), (0.1, 0.0), (0.25, 0.25), (0.4, 0.25), (1.0, 0.875)])
def test_the_bound_may_be_reached_and_the_prefix_ends_at_the_first_that_exceeds_it(bound, mass):
    p = torch.tensor([[[0.125, 0.0, 0.25, 0.5, 0.125]]])
    table = torch.tensor([[1, 2, 3, 4]] * 5, dtype=torch.int32)
    assert neighbour_mass(p, torch.tensor([[0]]), table, torch.tensor([[bound]])).item() == mass


@pytest.mark.parametrize(("count", "size"), [(1, 2), (7, 40), (1000, 1200)])
def test_triton_sums_the_same_prefixes(on_triton, count, size):
    generator = torch.Generator().manual_seed(count)
    p = distributions(3, 2, size)
    x = torch.randint(size, (3, 2), generator=generator)
    table = torch.stack([torch.randperm(size, generator=generator)[:count] for _ in range(size)]).int()
    bound = torch.tensor([[0.0, 1e-3], [0.1, 0.5], [0.9, 2.0]])
    (mass,) = on_triton("neighbours", "neighbour_mass", p, x, table, bound)
    # No sum lies within rounding of its bound here.
    torch.testing.assert_close(mass, neighbour_mass(p, x, table, bound), atol=1e-6, rtol=0)


def test_triton_reaches_the_bound(on_triton):
    p = torch.tensor([[[0.125, 0.0, 0.25, 0.5, 0.125]] * 5])
    table = torch.tensor([[1, 2, 3, 4]] * 5, dtype=torch.int32)
    bound = torch.tensor([[-1.0, 0.0, 0.25, 0.4, 1.0]])
    (mass,) = on_triton("neighbours", "neighbour_mass", p, torch.zeros(1, 5, dtype=torch.long), table, bound)
    assert mass.tolist() == [[0, 0, 0.25, 0.25, 0.875]]


def test_neighbour_mass_compiles_without_spills(compile_kernel):
    signature = {
        "p_ptr": "*fp32",
        "x_ptr": "*i64",
        "neighbours_ptr": "*i32",
        "bound_ptr": "*fp32",
        "mass_ptr": "*fp32",
    }
    signature |= {"vocab_size": "i32", "count": "i32"}
    compile_kernel("neighbours", "neighbour_mass_kernel", signature, {"block": 1024})
