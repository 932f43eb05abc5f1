"""Nearest codes are those of float64 distances."""

import pytest
import torch
import torch.nn.functional as F

import arimage.kernels.codebook
from arimage.kernels.codebook import nearest_code


def vectors(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


SIZES = [(1, 1, 1), (7, 5, 3), (70, 130, 8), (33, 300, 40)]


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("at_once", [1, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_code_finds_the_least_distance(size, unit, at_once, dtype, monkeypatch):
    monkeypatch.setattr(arimage.kernels.codebook, "_SCORES", at_once)
    rows, codes, width = size
    latents, codebook = vectors(rows, width), vectors(codes, width, seed=1)
    if unit:
        latents, codebook = F.normalize(latents, dim=-1), F.normalize(codebook, dim=-1)
    latents, codebook = latents.to(dtype), codebook.to(dtype)
    nearest = nearest_code(latents, codebook)
    assert nearest.dtype == torch.long
    assert torch.equal(nearest, (latents.double()[:, None] - codebook.double()).norm(dim=-1).argmin(-1))


def test_the_first_of_equal_codes_wins():
    latents = torch.randint(-3, 4, (20, 4), generator=torch.Generator().manual_seed(0)).float()
    codebook = torch.cat([vectors(65, 4, seed=2) + 50, latents.repeat(10, 1)])
    expected = (latents[:, None] == codebook).all(-1).byte().argmax(-1)
    assert torch.equal(nearest_code(latents, codebook), expected)
