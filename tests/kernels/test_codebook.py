"""Nearest codes are those of float64 distances."""

import pytest
import torch
import torch.nn.functional as F

from arimage.kernels.codebook import nearest_code, reference


def vectors(count, width, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


SIZES = [(1, 1, 1), (7, 5, 3), (70, 130, 8), (33, 300, 40)]


@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("at_once", [1, 1000])
def test_the_definition_finds_the_least_distance(size, unit, at_once, monkeypatch):
    monkeypatch.setattr(reference, "_SCORES", at_once)
    rows, codes, width = size
    latents, codebook = vectors(rows, width), vectors(codes, width, seed=1)
    if unit:
        latents, codebook = F.normalize(latents, dim=-1), F.normalize(codebook, dim=-1)
    nearest = nearest_code(latents, codebook)
    assert nearest.dtype == torch.long
    assert torch.equal(nearest, (latents.double()[:, None] - codebook.double()).norm(dim=-1).argmin(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_triton_finds_the_same_codes(on_triton, size, dtype):
    rows, codes, width = size
    latents, codebook = vectors(rows, width).to(dtype), vectors(codes, width, seed=1).to(dtype)
    (nearest,) = on_triton("codebook", "nearest_code", latents, codebook)
    assert torch.equal(nearest, nearest_code(latents, codebook))


def test_the_first_of_equal_codes_wins(on_triton):
    latents = torch.randint(-3, 4, (20, 4), generator=torch.Generator().manual_seed(0)).float()
    codebook = torch.cat(
        [vectors(65, 4, seed=2) + 50, latents.repeat(10, 1)]
    )  # equal codes in one block and in several
    expected = (latents[:, None] == codebook).all(-1).byte().argmax(-1)
    assert torch.equal(nearest_code(latents, codebook), expected)
    assert torch.equal(on_triton("codebook", "nearest_code", latents, codebook)[0], expected)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernel_compiles_without_spills(compile_kernel, dtype):
    signature = {"latents_ptr": f"*{dtype}", "codebook_ptr": f"*{dtype}", "out_ptr": "*i64"}
    signature |= dict.fromkeys(["rows", "size", "width"], "i32")
    constants = {"block_rows": 16, "block_codes": 128, "block_width": 16}
    compile_kernel("codebook", "nearest_code_kernel", signature, constants, num_warps=8)
