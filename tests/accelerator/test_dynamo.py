"""Compiled steps that are replayed, on plain tensors, since dynamo refuses those of the card: nothing is compiled in a
capture."""

import contextlib

import card
import pytest
import torch
from accelerator.runs import call, differences, expected, pipeline, refilled
from card import DEVICE, CardError, Tape, tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

from arimage.decoding import AutoregressiveDecoding
from arimage.decoding.run.captured_steps import CapturedSteps, CaptureStream


class Recorder(TorchDispatchMode):
    """Records the operators of a compiled step."""

    def __init__(self, tape: Tape):
        super().__init__()
        self._tape = tape

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [tensor for value in (*args, *kwargs.values()) for tensor in tensors_of(value)]
        self._tape.save(operator, args, kwargs, tensors)
        results = operator(*args, **kwargs)
        # On the CPU `one_hot` reads its values.
        if operator._schema.name != "aten::_local_scalar_dense":
            self._tape.record(operator, args, kwargs, results)
        return results


class PlainTape(Tape):
    def check_memory(self):
        """Who holds plain tensors is not known."""


class CapturedOnCpu(CapturedSteps):
    """Captures on the CPU as well."""

    def function_of(self, decoding, state):
        step, _ = super().function_of(decoding, state)
        return step, CaptureStream(torch.cuda.Stream())

    def fail(self, decoding, state, error):
        raise CardError("a capture failed") from error


@contextlib.contextmanager
def captured_steps(pipe):
    """Compile and capture the steps of a pipeline."""
    capturing = []

    @contextlib.contextmanager
    def capture(tape, **_):
        capturing.append(tape)
        try:
            with Recorder(tape):
                yield
        finally:
            capturing.pop()
            tape.finish()

    def backend(graph, inputs):
        if capturing:
            raise CardError("compiled while a graph is captured")
        return graph.forward

    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        card.patch_graphs(patch, PlainTape, capture)
        patch.setattr(pipe, "_compiled", CapturedOnCpu(backend=backend))
        DEVICE.replays = 0
        yield
    torch.compiler.reset()


PAIRS = [
    *(
        ("llamagen-text", text)
        for text in ("sjd-coupled:window=4", "ar", "zipar:window=2", "line-cache:lines=2", "eagle")
    ),
    *((family, "sjd-coupled:window=4") for family in ("mammothmoda2", "emu3", "arpg")),
    ("emu3", "ar"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "decoding"), PAIRS)
def test_compiled_steps_are_replayed(family, decoding):
    pipe = pipeline(family, "cpu")
    on_cpu = [expected(family, run, decoding) for run in (call, refilled)]
    with captured_steps(pipe):
        found = [run(pipe, decoding) for run in (call, refilled)]
    assert [differences(one, other) for one, other in zip(on_cpu, found, strict=True)] == [[], []]
    assert DEVICE.replays > 10


@pytest.mark.slow
def test_a_step_that_is_compiled_again_in_a_capture_is_noticed():
    class Counting(AutoregressiveDecoding):
        def step(self, state):
            super().step(state)
            state.calls = getattr(state, "calls", 0) + 1
            state.seeds.add_(state.calls)

    pipe = pipeline("llamagen-text", "cpu")
    with captured_steps(pipe), pytest.raises(CardError, match="failed"):
        call(pipe, Counting())
