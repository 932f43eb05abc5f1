"""The host sees which images are finished without waiting for the device to run dry."""

import pytest
import torch

from arimage.decoding.run import batch
from arimage.decoding.run.batch import AHEAD, Watch


class OnCuda(torch.Tensor):
    is_cuda = True


@pytest.fixture
def waits(monkeypatch):
    """A CUDA device that is the CPU: after how many recorded copies each copy was waited for."""
    recorded, waits, zeros = [], [], torch.zeros

    class Event:
        def record(self, stream):
            recorded.append(self)

        def synchronize(self):
            waits.append(len(recorded) - recorded[::-1].index(self) - 1 if self in recorded else None)

    def pinned_zeros(*shape, dtype, device, pin_memory):
        assert device == "cpu" and pin_memory
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(batch.torch, "zeros", pinned_zeros)
    monkeypatch.setattr(batch.torch.cuda, "Event", Event)
    monkeypatch.setattr(batch.torch.cuda, "current_stream", lambda device: None)
    return waits


def test_the_host_reads_the_copy_of_some_steps_before(waits):
    finished = torch.full((2,), False).as_subclass(OnCuda)
    looks = Watch(finished)
    seen = []
    for step in range(9):
        finished[0], finished[1] = step >= 2, step >= 5
        seen.append(looks.look().tolist())
    assert seen == [[step - AHEAD >= 2, step - AHEAD >= 5] for step in range(9)]
    assert waits == [None] * AHEAD + list(range(9 - AHEAD))
