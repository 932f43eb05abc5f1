"""`window="auto"`: exact whatever it picks, and it picks what decides most a second."""

from types import SimpleNamespace

import pytest
import torch
from decoding.test_exactness import assert_follows

from arimage.decoding import Sampling, SpeculativeJacobiDecoding, decode, decoding_from_name
from arimage.decoding.jacobi.adaptive_window import LOSS, AdaptiveWindow
from arimage.decoding.jacobi.step_seconds import SIZES, TABLE, _time, step_seconds
from arimage.decoding.run import batch
from arimage.decoding.run.batch import INTERVAL
from arimage.decoding.run.captured_steps import CapturedSteps
from arimage.kernels.timings import table_path


def decode_with(seconds, kept, num_tokens=2048):
    """The windows and the seconds of an image whose drafts are accepted with probability `kept` each, in a batch with
    one that is done."""
    adaptive, generator = AdaptiveWindow(seconds, num_tokens), torch.Generator().manual_seed(0)
    decided, running = torch.tensor([1, num_tokens]), torch.tensor([True, False])
    windows, spent = [], 0.0
    while decided[0] < num_tokens:
        windows.append(adaptive.window)
        spent += seconds[adaptive.window]
        leading = (torch.rand(2, adaptive.window, generator=generator) < kept).long().cumprod(1).sum(1)
        adaptive.observe(leading, running)
        decided[0] += leading[0] + 1
        if len(windows) % INTERVAL == 0:
            adaptive.choose(decided)
    return windows, spent


def test_the_window_follows_what_is_kept():
    seconds = {size: 8.0 + size for size in SIZES}
    few, many = (decode_with(seconds, kept)[0][-1] for kept in (0.1, 0.9))
    assert few < many <= 32


@pytest.mark.parametrize("fixed", [0.0, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("num_tokens", [64, 256, 1024])
def test_trying_costs_no_more_than_allowed(fixed, num_tokens):
    seconds = {size: fixed + size for size in SIZES}
    _, spent = decode_with(seconds, 0.0, num_tokens)
    assert spent <= (1 + LOSS) * num_tokens * seconds[1]


def test_the_best_fixed_window_is_found():
    """Where a window of W drafts decides W ** 0.55 tokens per step, as measured on the packaged model."""
    seconds = {size: 4 + 0.1 * size + 0.0003 * size**2 for size in SIZES}
    num_tokens, decided, spent, steps = 1024, 1.0, 0.0, 1
    adaptive = AdaptiveWindow(seconds, num_tokens)
    while decided < num_tokens:
        spent += seconds[adaptive.window]
        decided += adaptive.window**0.55
        adaptive.observe(torch.tensor([adaptive.window**0.55 - 1]), torch.tensor([True]))
        steps += 1
        if steps % INTERVAL == 0:
            adaptive.choose(torch.tensor([int(decided)]))
    assert spent <= 1.05 * min(num_tokens / size**0.55 * cost for size, cost in seconds.items())


@pytest.fixture
def timed(monkeypatch):
    """`step_seconds` on a clock that only its steps advance, by `cost(size)` seconds each."""
    now = 0.0
    monkeypatch.setattr("arimage.decoding.jacobi.step_seconds.time", SimpleNamespace(perf_counter=lambda: now))

    def timed(model, cost, made, batch_size=3, how=""):
        def step(size):
            nonlocal now
            made.append(size)
            now += cost(size)

        return step_seconds(model, batch_size, False, how, lambda: step)

    return timed


def test_steps_are_timed_once_for_a_network_and_batch_size(table_model, timed):
    model, made = table_model(grid=(2, 5), vocab_size=2), []
    seconds = timed(model, lambda size: 1.0, made)
    assert sorted(set(made)) == [1, 2, 4, 8] and seconds == dict.fromkeys([1, 2, 4, 8], 1.0)
    made.clear()
    assert timed(model, lambda size: 1.0, made) is seconds and not made
    assert timed(model, lambda size: 1.0, made, batch_size=4) is not seconds and made


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps", "cpu"])
def test_the_clock_waits_for_the_device(kind, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    device = torch.device(kind)
    _time(lambda size: waited.append(size), 4, device)
    assert waited == ([4] if kind == "cpu" else [device, 4, device])


def test_the_steps_that_run_are_timed(table_model):
    """And leave the images as they were, whatever a step does to them."""
    model, seeds, taken = table_model(grid=(2, 5), vocab_size=3), torch.arange(6), []

    class Recording(CapturedSteps):
        def function_of(self, decoding, state):
            def step(state):
                taken.append((state, state.window))
                decoding.step(state)

            return step, None

    decoding = decoding_from_name("sjd-coupled", window="auto")
    measured = decode(model, decoding, Sampling(), seeds, captured_steps=Recording())
    timed = {window for _, window in taken}
    assert timed >= {1, 2} and {id(state) for state, _ in taken} == {id(measured)}
    count = len(taken)
    known = decode(model, decoding, Sampling(), seeds, captured_steps=Recording())
    assert torch.equal(known.tokens, measured.tokens) and torch.equal(known.accepted, measured.accepted)
    assert len(taken) - count == known.forward_passes - 1 < count - (known.forward_passes - 1)


def test_seconds_are_remembered_on_disk(table_model, timed):
    def model():
        model = table_model(grid=(2, 5), vocab_size=2)
        model.network = torch.nn.Linear(3, 5)
        return model

    made = []
    seconds = timed(model(), lambda size: 1.0, made)
    made.clear()
    assert timed(model(), lambda size: 1.0, made) == seconds and not made
    table_path(TABLE).write_text("not a table")
    timed(model(), lambda size: 1.0, made)
    assert made and "Linear, 20 parameters, torch.float32" in table_path(TABLE).read_text()


def test_a_cache_that_cannot_be_written_costs_a_warning_only(table_model, timed, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    model = table_model(grid=(2, 5), vocab_size=2)
    model.network = torch.nn.Linear(3, 7)
    assert timed(model, lambda size: 1.0, []) and "step_seconds.json" in caplog.text


@pytest.mark.every(2)
@pytest.mark.parametrize(("refresh", "levels"), [("independent", 0), ("coupled", 2), ("gumbel", 0)])
def test_whatever_window_is_picked_images_follow_the_joint_distribution(table_model, monkeypatch, refresh, levels):
    # The two windows in turn, at every step.
    monkeypatch.setattr(batch, "INTERVAL", 1)
    monkeypatch.setattr("arimage.decoding.jacobi.speculative_jacobi.step_seconds", lambda *_: {1: 1.0, 4: 1.0})
    turns = iter([1, 4] * 10)
    monkeypatch.setattr(AdaptiveWindow, "choose", lambda *_: next(turns))
    model, size = table_model(grid=(2, 3), vocab_size=2), 10_000
    decoding = SpeculativeJacobiDecoding("auto", refresh, levels=levels)
    state = decode(model, decoding, Sampling(top_p=0.9), torch.arange(size))
    assert_follows(state.tokens, model.joint(Sampling(top_p=0.9)), 2)
