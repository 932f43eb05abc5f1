"""Numbers are those of Philox, uniform, and a function of seed, position, purpose and step alone."""

import math

import pytest
import torch

from arimage.decoding import noise
from arimage.decoding.noise import Purpose
from arimage.kernels.noise.reference import philox


def words(text):
    return [torch.tensor(int(word, 16)) for word in text.split()]


def uniforms(seeds, positions, purpose, step, count):
    """Those of one step of all images."""
    return noise.uniforms(seeds, positions, purpose, torch.full_like(seeds, step), count)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    assert philox(words(counter), words(key)).tolist() == [int(word) for word in words(expected)]


def test_counter_and_key_are_laid_out_as_documented():
    seed, position, step = 0x299F31D0A4093822, 0x243F6A88, 0x05A308D3
    sampled = uniforms(torch.tensor([seed]), torch.tensor([[position]]), Purpose.REFRESH, step, 6)
    first, second = (
        philox(words(f"{position:x} {step:x} {int(Purpose.REFRESH):x} {block}"), words("a4093822 299f31d0"))
        for block in (0, 1)
    )
    assert sampled.flatten().tolist() == [(int(word) >> 8) / 2**24 for word in torch.cat([first, second[:2]])]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_more_numbers_begin_with_the_fewer(count):
    seeds, positions = torch.tensor([1, 2]), torch.tensor([[0, 5, 9], [1, 2, 3]])
    many = uniforms(seeds, positions, Purpose.GUMBEL, 0, 12)
    few = uniforms(seeds, positions, Purpose.GUMBEL, 0, count)
    assert few.shape == (2, 3, count) and few.dtype == torch.float32
    assert torch.equal(few, many[..., :count])


@pytest.mark.parametrize(
    ("seeds", "positions", "steps", "count"),
    [(1 << 18, 1, 1, 1), (1, 1 << 18, 1, 1), (256, 32, 32, 1), (1, 1, 1, 1 << 18)],
    ids=["over seeds", "over positions", "over passes", "over a vocabulary"],
)
def test_numbers_are_uniform_and_uncorrelated(seeds, positions, steps, count):
    at = torch.arange(positions).expand(seeds, -1)
    sampled = torch.cat([uniforms(torch.arange(seeds), at, Purpose.SAMPLE, step, count) for step in range(steps)], 1)
    sampled = sampled.double().flatten()
    assert 0 <= sampled.min() and sampled.max() < 1
    bins = 256
    expected = len(sampled) / bins
    counts = torch.histc(sampled, bins, 0, 1)
    statistic = ((counts - expected) ** 2 / expected).sum()
    chance = torch.special.gammaincc(torch.tensor((bins - 1) / 2).double(), statistic / 2)
    assert 1e-4 < chance < 1 - 1e-4
    centred = (sampled - 0.5) * math.sqrt(12)
    for lag in (1, 2, 3, 4, 7, 32, 1024):
        assert abs((centred[lag:] * centred[:-lag]).mean()) < 5 / math.sqrt(len(sampled))


def test_the_ends_of_the_interval_are_reached_but_never_one():
    sampled = uniforms(torch.arange(1 << 12), torch.arange(1 << 8).expand(1 << 12, -1), Purpose.START, 3, 4)
    assert sampled.min() < 2**-20 and 1 - 2**-20 < sampled.max() < 1
    assert torch.equal(sampled * 2**24, (sampled * 2**24).floor())


SEEDS = torch.tensor([0, 1, -1, 2**31, 2**32, 2**32 + 1, -(2**32), 2**40, 2**63 - 1, -(2**63)])


def test_a_number_does_not_depend_on_the_batch_nor_on_the_layout():
    positions = torch.stack([torch.randperm(1024, generator=torch.Generator().manual_seed(i))[:7] for i in range(10)])
    together = uniforms(SEEDS, positions, Purpose.VERIFY, 5, 3)
    for b, seed in enumerate(SEEDS):
        assert torch.equal(uniforms(seed[None], positions[b, None], Purpose.VERIFY, 5, 3), together[b, None])
        for j, position in enumerate(positions[b]):
            alone = uniforms(seed[None], position[None, None], Purpose.VERIFY, 5, 3)
            assert torch.equal(alone[0, 0], together[b, j])
    strided = positions.T.contiguous().T
    assert torch.equal(uniforms(SEEDS, strided, Purpose.VERIFY, 5, 3), together)
    assert torch.equal(uniforms(SEEDS, positions[:, :1], Purpose.VERIFY, 5, 3), together[:, :1])


def test_seeds_positions_purposes_steps_and_places_all_differ():
    positions = torch.tensor([0, 1, 2, 1023, 2**31, 2**32 - 1]).expand(len(SEEDS), -1)
    sampled = [uniforms(SEEDS, positions, purpose, step, 8) for purpose in Purpose for step in (0, 1, 2, 4096)]
    sampled = torch.stack(sampled).flatten()
    # Two equal 24-bit numbers are nothing strange; four equal pairs in a row would be.
    quadruples = torch.stack([sampled[:-3], sampled[1:-2], sampled[2:-1], sampled[3:]], dim=1)
    assert len(quadruples.unique(dim=0)) == len(quadruples)
    assert len(sampled.unique()) > 0.999 * len(sampled)
