"""The random numbers in Triton equal the reference, which tests/decoding/contract/test_noise.py examines."""

import math

import pytest
import torch

from arimage.kernels.noise import exponentials, normals, uniforms


SEEDS = torch.tensor([0, 1, -1, 2**31, 2**32 + 5, 2**63 - 1, -(2**63)])


def arguments(count, queries=3):
    positions = torch.arange(len(SEEDS) * queries).view(len(SEEDS), queries) * 77
    positions[0, 0] = 2**32 - 1
    return SEEDS, positions, torch.arange(len(SEEDS)) * 1000, 4, count


@pytest.mark.every(2)
@pytest.mark.parametrize("count", [1, 2, 4, 7, 1024, 5003])
def test_uniform_numbers_are_the_same(on_triton, count):
    (actual,) = on_triton("noise", "uniforms", *arguments(count))
    assert torch.equal(actual, uniforms(*arguments(count)))


def test_no_steps_are_steps_of_zero(on_triton):
    seeds, positions, steps, purpose, count = arguments(3)
    expected = uniforms(seeds, positions, torch.zeros_like(steps), purpose, count)
    assert torch.equal(uniforms(seeds, positions, None, purpose, count), expected)
    assert torch.equal(on_triton("noise", "uniforms", seeds, positions, None, purpose, count)[0], expected)


@pytest.mark.parametrize("count", [1, 5, 2048])
def test_exponential_numbers_are_the_same_up_to_rounding(on_triton, count):
    (actual,) = on_triton("noise", "exponentials", *arguments(count))
    expected = exponentials(*arguments(count))
    assert (actual > 0).all() and actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("count", [1, 2, 7, 2049])
def test_normal_numbers_are_the_same_up_to_rounding(on_triton, count):
    (actual,) = on_triton("noise", "normals", *arguments(count))
    expected = normals(*arguments(count))
    # The reference rounds its angle of up to 2 pi.
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=4e-6)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_normal_numbers_are_those_of_box_and_muller(count):
    pairs = (count + 1) // 2
    radius = (2 * exponentials(*arguments(pairs))).sqrt()
    angle = 2 * math.pi * uniforms(*arguments(2 * pairs))[..., pairs:]
    expected = torch.cat([radius * angle.cos(), radius * angle.sin()], dim=-1)[..., :count]
    assert torch.equal(normals(*arguments(count)), expected)


@pytest.mark.parametrize("ones", [False, True], ids=["", "one position, one number"])
@pytest.mark.parametrize("kind", ["uniform", "exponential", "normal"])
def test_noise_compiles_without_spills(compile_kernel, kind, ones):
    signature = dict.fromkeys(("seeds_ptr", "positions_ptr", "steps_ptr"), "*i64")
    signature |= {"out_ptr": "*fp32", "queries": "i32", "key": "i64", "count": "i32"}
    constants = {"kind": kind, "block": 512}
    # Triton compiles an argument that is 1 as a constant.
    compile_kernel("noise", "noise_kernel", signature, constants | ({"queries": 1, "count": 1} if ones else {}))
