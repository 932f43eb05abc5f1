"""Steps that are captured in CUDA graphs and replayed, on the card of the tests."""

import contextlib
import gc
import threading
from types import SimpleNamespace

import card
import pytest
import torch
from pipelines.chameleon import tiny as tiny_chameleon
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.decoding import (
    AutoregressiveDecoding,
    Layout,
    Sampling,
    decode,
    decoding_from_name,
    decoding_from_text,
)
from arimage.decoding.jacobi import speculative_jacobi
from arimage.decoding.run.captured_steps import WARM_UP, Capture, CapturedState, CapturedSteps
from arimage.pipelines.llamagen.transformer_llamagen import LlamaGenTokenModel


pytest.importorskip("triton", reason="triton is not installed")

SAMPLING = Sampling(guidance_scale=2.0)


@pytest.fixture(autouse=True)
def device():
    with card.card() as device, torch.no_grad():
        yield device


def on(place, module):
    return module if place == "cpu" else card.move_module(module)


def condition(place):
    return {"class_labels": torch.tensor([1, 3], device=place)}


def llamagen(place, grid=4):
    transformer = on(place, tiny_llamagen.transformer("class", grid=grid, num_layers=1))
    return LlamaGenTokenModel(transformer, condition(place), Layout((grid, grid)), guided=True)


def lumina(place):
    """A language model with row ends in its cache."""
    pipe = tiny_chameleon.pipeline()
    if place != "cpu":
        card.move(pipe)
    return pipe.prepare(prompt=["cat", "a red heart"], guidance_scale=2.0).model


def run(make, decoding, on_step=None, compiled=None):
    """The state of eager steps on the CPU, and that of captured ones."""
    place = "cpu" if compiled is None else "cuda"
    return decode(make(place), decoding, SAMPLING, torch.arange(2, device=place), on_step, compiled)


@pytest.mark.parametrize("options", [{}, {"mode": "max-autotune"}, {"backend": "eager"}, {"options": {}}], ids=str)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_inductor_takes_options_of_this_library_on_a_gpu_where_there_are_none(device, monkeypatch, options, place):
    given = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: given.append(options) or function)
    state = AutoregressiveDecoding().start(llamagen(place), SAMPLING, torch.arange(2, device=place))
    CapturedSteps(**options).function_of(AutoregressiveDecoding(), state)
    own = {"options": {"force_pointwise_cat": True}} if place == "cuda" and not options else {}
    expected = {"mode": "max-autotune-no-cudagraphs"} if "mode" in options else options
    assert given == [{"fullgraph": True, "dynamic": False, **expected, **own}]


def test_every_window_has_a_graph_of_its_own(device, monkeypatch):
    monkeypatch.setattr(speculative_jacobi, "step_seconds", lambda *_: {1: 1.0, 4: 1.1, 8: 1.3})
    windows = []

    def step(captured, plain=CapturedState.step):
        windows.append(captured.state.window)
        return plain(captured)

    monkeypatch.setattr(CapturedState, "step", step)
    decoding = decoding_from_name("sjd-coupled", window="auto")
    expected = run(lambda place: llamagen(place, 8), decoding)
    state = run(lambda place: llamagen(place, 8), decoding, compiled=CapturedSteps())
    assert torch.equal(state.tokens.cpu(), expected.tokens)
    replays = [windows.count(size) - WARM_UP for size in set(windows) if windows.count(size) > WARM_UP]
    assert len(set(windows)) > 1 and (device.captures, device.replays) == (len(replays), sum(replays))


@pytest.mark.parametrize("make", [lumina, pytest.param(lambda place: llamagen(place, 8), marks=pytest.mark.slow)])
def test_graphs_of_measured_steps_are_those_that_run(device, monkeypatch, make):
    """And steps that measured how long they take leave no trace in the images."""
    seconds, ways = {1: 1.0, 4: 1.1, 8: 1.3}, []

    def measured(model, batch_size, guided, how, start):
        ways.append(how)
        step = start()
        for size in seconds:
            for _ in range(WARM_UP + 2):
                step(size)
        return seconds

    monkeypatch.setattr(speculative_jacobi, "step_seconds", lambda *_: seconds)
    decoding, taken = decoding_from_name("sjd-coupled", window="auto"), []
    expected = run(make, decoding)
    monkeypatch.setattr(speculative_jacobi, "step_seconds", measured)
    assert torch.equal(run(make, decoding).tokens, expected.tokens)
    state = run(make, decoding, lambda *_: bool(taken.append(1)), CapturedSteps())
    assert torch.equal(state.tokens.cpu(), expected.tokens)
    assert ways == ["", "compiled with dynamic=False, fullgraph=True"]
    assert device.captures == 3 and device.replays == 2 * len(seconds) + len(taken) - 1


def test_other_threads_use_the_device_during_a_capture(device):
    there, read = torch.arange(3, device="cuda"), []

    def step(state):
        thread = threading.Thread(target=lambda: read.append(there.tolist()))
        thread.start()
        thread.join()

    state = SimpleNamespace(step_variant=(), head_calls=0, seeds=there)
    captured = CapturedState(CapturedSteps(compiles=False), SimpleNamespace(step=step), state, keeps=False)
    for _ in range(WARM_UP + 1):
        captured.step()
    assert read == [[0, 1, 2]] * (WARM_UP + 1) and device.captures == 1


def test_a_capture_that_fails_changes_nothing_and_is_told_once(device, caplog):
    class Failing(AutoregressiveDecoding):
        def step(self, state):
            assert gc.isenabled() == (device.tape is None)
            super().step(state)
            if device.tape is not None:
                raise RuntimeError("CUDA error: out of memory")

    steps = CapturedSteps()
    expected = run(llamagen, AutoregressiveDecoding())
    for _ in range(2):
        state = run(llamagen, Failing(), compiled=steps)
        assert torch.equal(state.tokens.cpu(), expected.tokens)
        assert torch.equal(state.accepted_per_step(), expected.accepted_per_step())
    assert (device.captures, device.replays) == (1, 0)
    assert [record.message for record in caplog.records] == [
        "steps are not replayed from CUDA graphs, since a capture failed: CUDA error: out of memory"
    ]


def test_all_graphs_share_a_stream_and_a_pool(device, monkeypatch):
    places, capture = set(), torch.cuda.graph

    def recording(graph, pool, stream, **settings):
        places.add((id(pool), id(stream)))
        return capture(graph, pool=pool, stream=stream, **settings)

    monkeypatch.setattr(torch.cuda, "graph", recording)
    steps = CapturedSteps()
    for name in ("ar", "sjd-coupled:window=4", "ar"):
        run(llamagen, decoding_from_text(name), compiled=steps)
    assert device.captures == 3 and len(places) == 1


@pytest.mark.parametrize("raised", [1, 2])
def test_a_replay_is_compared_in_what_an_eager_step_writes(raised):
    """And not in what steps leave behind, which is a new tensor in an eager one."""
    state = SimpleNamespace(tokens=torch.zeros(2), left=torch.zeros(2))
    left = state.left

    def step(state):
        state.tokens += 1
        state.left = state.tokens + 0

    def replay():
        state.tokens += raised
        left.copy_(state.tokens)

    captured = CapturedState(SimpleNamespace(check_every=1, program=None), None, state, keeps=False)
    with contextlib.nullcontext() if raised == 1 else pytest.raises(RuntimeError, match="StepKey"):
        captured._replay(step, Capture(SimpleNamespace(replay=replay), 0, 0))
    assert state.tokens.tolist() == left.tolist() == [raised, raised]
