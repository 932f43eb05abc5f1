"""Numbers are uniform, independent, and a function of seed, position, purpose and step alone."""

import math

import pytest
import torch

from arimage.decoding.contract import noise
from arimage.decoding.contract.noise import Purpose
from arimage.kernels.noise import BLOCK, POSITION, PURPOSE, SEED, STEP, _words, signed, splitmix


def uniforms(seeds, positions, purpose, step, count):
    """Those of one step of all images."""
    return noise.uniforms(seeds, positions, torch.full_like(seeds, step), purpose, count)


def test_the_finaliser_is_that_of_splitmix64():
    # The generator itself, from the seed 1234567.
    state = torch.tensor([signed(1234567 + i * 0x9E3779B97F4A7C15) for i in range(1, 6)])
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix(state).tolist() == [signed(word) for word in expected]


def test_a_number_is_that_of_the_documented_sum():
    seed, position, step, purpose = -12345, 2**40 + 7, 1000, Purpose.REFRESH
    sampled = uniforms(torch.tensor([seed]), torch.tensor([[position]]), purpose, step, 5)
    words = []
    for block in range(3):
        factors = SEED, POSITION, STEP, PURPOSE, BLOCK
        values = seed, position, step, purpose + 1, block
        total = sum(factor * value for factor, value in zip(factors, values, strict=True))
        word = splitmix(torch.tensor([signed(total)])).item() % 2**64
        words += [word % 2**32, word >> 32]
    assert sampled.flatten().tolist() == [(word >> 8) / 2**24 for word in words[:5]]


def chance(counts, expected):
    """The chance of a chi-square statistic at least as large."""
    statistic = ((counts - expected) ** 2 / expected).sum().double()
    return torch.special.gammaincc(torch.tensor((counts.numel() - 1) / 2).double(), statistic / 2)


# Numbers [seeds, positions, steps, purposes, indices].
@pytest.fixture(scope="module")
def numbers():
    seeds = torch.arange(64)
    at = torch.arange(64).expand(64, -1)
    steps = [[uniforms(seeds, at, purpose, step, 4) for purpose in Purpose] for step in range(32)]
    return torch.stack([torch.stack(purposes) for purposes in steps]).permute(2, 3, 0, 1, 4)


@pytest.mark.every(2)
@pytest.mark.parametrize("distance", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
@pytest.mark.parametrize("axis", range(5), ids=["seeds", "positions", "steps", "purposes", "indices"])
def test_neighbours_are_independent(numbers, axis, distance):
    length = numbers.shape[axis] - distance
    pair = [numbers.narrow(axis, start, length).flatten() for start in (0, distance)]
    first, second = ((values.double() - 0.5) * math.sqrt(12) for values in pair)
    assert abs((first * second).mean()) < 5 / math.sqrt(len(first))
    cells = torch.bincount((pair[0] * 32).long() * 32 + (pair[1] * 32).long(), minlength=1024)
    assert 1e-5 < chance(cells, len(first) / 1024) < 1 - 1e-5
    # The lowest bits of neighbours agree as often as not.
    equal = ((pair[0] * 2**24).long() ^ (pair[1] * 2**24).long()) & 1
    assert abs(equal.double().mean() - 0.5) < 2.5 / math.sqrt(len(equal))


@pytest.mark.parametrize(("name", "bits"), [("seeds", 64), ("positions", 32), ("steps", 32)])
def test_every_bit_of_the_input_flips_half_of_the_output(name, bits):
    count = 1 << 12
    generator = torch.Generator().manual_seed(0)
    arguments = {"seeds": torch.randint(1 << 10, (count,), generator=generator)}
    arguments |= {"positions": torch.randint(1 << 10, (count, 1), generator=generator)}
    arguments |= {"steps": torch.randint(1 << 10, (count,), generator=generator)}
    words = _words(**arguments, purpose=1, count=2)
    for bit in range(bits):
        flipped = _words(**arguments | {name: arguments[name] ^ signed(1 << bit)}, purpose=1, count=2)
        changed = (words ^ flipped)[..., None] >> torch.arange(32) & 1
        # 64 bits of output and up to 64 of input: 5.5 standard deviations.
        assert (changed.double().mean((0, 1)) - 0.5).abs().max() < 2.75 / math.sqrt(count)


def test_the_ends_of_the_interval_are_reached_but_never_one():
    sampled = uniforms(torch.arange(1 << 12), torch.arange(1 << 8).expand(1 << 12, -1), Purpose.START, 3, 4)
    assert sampled.min() < 2**-20 and 1 - 2**-20 < sampled.max() < 1
    assert torch.equal(sampled * 2**24, (sampled * 2**24).floor())
