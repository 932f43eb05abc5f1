"""The card itself: it behaves as a CUDA device does, and notices steps that would not."""

import card
import pytest
import torch
from accelerator.runs import call, compare
from card import CardError

from arimage.decoding import AutoregressiveDecoding


@pytest.fixture
def device():
    with card.card() as device:
        yield device


def zeros(*shape, **options):
    return torch.zeros(*shape, device="cuda", **options)


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(2)),
        lambda x: torch.addmm(x, torch.ones(1, 3), torch.ones(3, 3)),
    ],
)
def test_tensors_of_two_devices_are_refused(device, mixed):
    with pytest.raises(CardError):
        mixed(zeros(3))
    assert (zeros(3) + torch.tensor(1)).tolist() == [1, 1, 1]


WAITS = [
    lambda x: x.max().item(),
    lambda x: bool(x.any()),
    lambda x: x.tolist(),
    lambda x: x.cpu(),
    lambda x: x.nonzero(),
    lambda x: x[x > 0],
    lambda x: x[[0, 1]],
    lambda x: torch.equal(x, x),
    lambda x: torch.tensor([1, 2], device="cuda"),
    lambda x: x.copy_(torch.ones(3)),
]


@pytest.mark.parametrize("wait", WAITS)
def test_the_host_waits_and_must_not_in_a_capture(device, wait):
    x = zeros(3)
    wait(x)
    assert device.waits.total() == 1
    with pytest.raises(CardError, match="captured"):
        captured(lambda: wait(x))


def test_a_capture_runs_nothing_and_a_replay_all(device):
    x, out, table = zeros(3), zeros(3), torch.arange(3.0, device="cuda")
    calls = []

    def step():
        calls.append(len(calls))
        x.add_(table)
        x[1:].mul_(2)
        torch.add(x, 1, out=out)

    graph = captured(step)
    assert x.tolist() == out.tolist() == [0, 0, 0] and device.captures == 1
    graph.replay()
    assert x.tolist() == [0, 2, 4] and out.tolist() == [1, 3, 5]
    x.copy_(table)
    graph.replay()
    assert x.tolist() == [0, 4, 8] and calls == [0] and device.replays == 2


def waits(state):
    state.steps.max().item()


def copies_from_the_host(state):
    torch.tensor([1, 2, 3], device=state.seeds.device)


def mixes_devices(state):
    state.seeds + torch.tensor([1, 1, 1])


def counts_in_python(state):
    state.calls = getattr(state, "calls", 0) + 1
    state.seeds.add_(state.calls)


def replaces_a_buffer(state):
    state.held = state.steps
    state.steps = state.held + 0


def uses_freed_memory(state):
    state.before = getattr(state, "before", state.seeds)
    state.seeds.add_(state.before[:1] * 0)
    state.before = state.seeds.new_zeros(3)


def broken(change):
    class Broken(AutoregressiveDecoding):
        def step(self, state):
            super().step(state)
            change(state)

    return Broken()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("change", "notice"),
    [
        (waits, "not permitted while a graph is captured"),
        (copies_from_the_host, "not permitted while a graph is captured"),
        (mixes_devices, "on the CPU"),
        (counts_in_python, "ARIMAGE_EAGER"),
        (replaces_a_buffer, "out of bounds"),
        (uses_freed_memory, "freed"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_broken_step_is_noticed(change, notice):
    assert notice in "".join(compare("llamagen-text", "replayed", call, broken(change)))
