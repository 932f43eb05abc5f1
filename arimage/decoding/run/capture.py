"""Decoding steps compiled with `torch.compile` and replayed from CUDA graphs."""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch

from ..contract.state import DecodingState, LockstepState
from ..contract.supports import Decoding
from .kept import KeptStates


logger = logging.getLogger(__name__)

Step = Callable[[DecodingState], None]

# Uncaptured steps per shape, in which steps are compiled and libraries allocate their workspaces.
WARM_UP = 2
KEPT_BYTES = 8 << 30
# How often a step of one decoding and batch size may be compiled: every scale or group has its own shapes.
_RECOMPILATIONS = 1024
# Steps are captured here, since the CUDA graphs of inductor exclude functions that mutate their inputs.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


class CompiledSteps:
    """Compiles the steps of decodings: forward pass, sampling and bookkeeping in one graph, without a break. On a CUDA
    device the compiled step is then captured, see `CapturedStep`. States of finished calls are kept with their
    captures, see `KeptStates`.

    Every pair of decoding and batch size has its own compiled function, so that a long-running process never reaches
    PyTorch's recompilation limit, which counts per function. The limit is raised from 8 to 1,024 for the whole
    process.

    Args:
        compiles: False captures steps as they are.
        kept_bytes: how much memory the states of finished calls may take.
        options: passed to `torch.compile`; by default `fullgraph` is True and `dynamic` is False. With the backend
            "eager" the operators are not compiled, and only the overhead of launching them is saved.
    """

    def __init__(self, *, compiles: bool = True, kept_bytes: int = KEPT_BYTES, **options):
        if options.get("mode") in _WITHOUT_GRAPHS:
            options["mode"] = _WITHOUT_GRAPHS[options["mode"]]
        self.compiles, self._options = compiles, {"fullgraph": True, "dynamic": False, **options}
        self._compiled: dict[Hashable, Callable] = {}
        # One stream and one memory pool per device, for all graphs.
        self._places: dict[torch.device, tuple[torch.cuda.Stream, Any]] = {}
        # The decodings and batch sizes whose steps could not be captured.
        self._eager: set[Hashable] = set()
        self.kept, self._weights = KeptStates(kept_bytes), []
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _RECOMPILATIONS)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _RECOMPILATIONS)

    def __str__(self) -> str:
        options = (f"{name}={getattr(value, '__name__', value)}" for name, value in sorted(self._options.items()))
        return f"compiled with {', '.join(options)}"

    def use_weights(self, weights: list[Hashable]) -> None:
        """Called before steps with the addresses of the weights, and the scales of adapters: a graph reads the weights
        where they were, and multiplies by the scales that there were, when it was captured. So graphs of others are
        dropped."""
        if weights != self._weights:
            self.kept.clear()
        self._weights = weights

    def __call__(self, decoding: Decoding, state: DecodingState) -> Step:
        """The function that takes the steps of `state`, which `decoding` has started."""
        key, step = (type(decoding), len(state.seeds)), decoding.step
        if self.compiles:
            if key not in self._compiled:
                self._compiled[key] = torch.compile(_copy_of(type(decoding).step), **self._options)
            step = partial(self._compiled[key], decoding)
        if not state.seeds.is_cuda or key in self._eager:
            return step
        device = state.seeds.device
        if device not in self._places:
            self._places[device] = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        return CapturedStep(step, device, *self._places[device], lambda: self._eager.add(key))


@dataclass
class Capture:
    """A CUDA graph, and by how much its step raises `head_calls` of the state."""

    graph: torch.cuda.CUDAGraph
    head_calls: int


class CapturedStep:
    """Takes the steps of one state on a CUDA device: captures a CUDA graph per `DecodingState.step_shape`, and replays
    it from then on.

    A replay runs the same kernels on the same memory, without Python, so the tensors of the state, its model and its
    cache must stay the same objects while their contents change. If a capture fails, which changes nothing, the steps
    go on without graphs.

    Args:
        step: the function to capture, which must not read the device.
        stream, pool: where graphs are captured, and their memory. Graphs may share it, because none of them reads what
            another left there.
        on_failure: called when a capture has failed.
    """

    def __init__(
        self, step: Step, device: torch.device, stream: torch.cuda.Stream, pool: Any, on_failure: Callable[[], None]
    ):
        self._step, self._device = step, device
        self._stream, self._pool, self._on_failure = stream, pool, on_failure
        self._captures: dict[Hashable, Capture] = {}
        self._taken = Counter()
        self._failed = False

    def __call__(self, state: DecodingState) -> None:
        shape = state.step_shape
        if shape is None or self._failed:
            self._step(state)
        elif shape in self._captures:
            capture = self._captures[shape]
            capture.graph.replay()
            if capture.head_calls:
                state.head_calls += capture.head_calls
            if isinstance(state, LockstepState):
                state.taken += 1
        else:
            self._warm_up(state)
            self._taken[shape] += 1
            # A step at which an image is only once is captured right after it.
            if self._taken[shape] == (1 if isinstance(state, LockstepState) else WARM_UP):
                self._capture(state, shape)

    def _capture(self, state: DecodingState, shape: Hashable) -> None:
        """Capture the step that has just been taken once more, which runs nothing."""
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        calls, taken = state.head_calls, 0
        if isinstance(state, LockstepState):
            taken = state.taken
            state.taken -= 1
        # A kernel that the garbage collector unloads would end the capture.
        gc.collect()
        gc.disable()
        try:
            # `graph` leaves its stream current if it fails. Other threads may use the device during the capture.
            with (
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                self._step(state)
            self._captures[shape] = Capture(graph, state.head_calls - calls)
        except RuntimeError as error:
            logger.warning("steps are not replayed from CUDA graphs, since a capture failed: %s", error)
            self._failed = True
            self._on_failure()
        finally:
            if isinstance(state, LockstepState):
                state.taken = taken
            if state.head_calls != calls:
                state.head_calls = calls
            if collects:
                gc.enable()

    def _warm_up(self, state: DecodingState) -> None:
        """Take a step on the capture stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step(state)
        current.wait_stream(self._stream)


def _copy_of(function: Callable) -> Callable:
    """A copy of the function with its own code object, since dynamo counts compilations per code object."""
    code, closure = function.__code__.replace(), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
