"""`benchmarks/peak_memory.py`: what tensors take at a time, and what films of published sizes need."""

import peak_memory
import pytest
import torch
from step_cost import fake_cuda

from arimage.pipelines.infinitystar.schedules import SCHEDULES


def test_memory_counts_from_the_operator_that_makes_it_until_it_is_freed():
    with fake_cuda():
        given = torch.empty(1000)

        def run():
            first = given + 1
            second = first.view(10, 100) * 2
            del first
            second += 1
            third = torch.cat([second, second])
            return second.sum() + third.sum()

        # First and second; then second and third, twice as large; then two sums and theirs.
        assert peak_memory.peak_of(run) == 4 * (1000 + 2000 + 3)
        assert peak_memory.peak_of(lambda: given.view(10, 100).mT) == 0


@pytest.mark.slow
@pytest.mark.parametrize("film", peak_memory.FILMS)
def test_a_film_of_two_layers(film, monkeypatch):
    pixels, finest, frames = peak_memory.FILMS[film]
    assert (pixels, finest) in SCHEDULES
    monkeypatch.setattr(peak_memory, "LAYERS", 2)
    found = peak_memory.measure(pixels, finest, frames, 1, "next-scale:stop_after=80")
    # The feed-forward layers read a part of the cells at a time, and no keys of the last clip are kept.
    most = {"480p, 81 frames": 5, "480p, 161 frames": 6, "720p, 81 frames": 11}
    assert 1e9 < found["passes, bfloat16"] < most[film] * 1e9
    # Frames are decoded a few at a time.
    assert found["frames"] < {"0.40M": 6, "0.90M": 13}[pixels] * 1e9
    assert 0.5 < found["transformer, int8"] / found["transformer, bfloat16"] < 0.6
