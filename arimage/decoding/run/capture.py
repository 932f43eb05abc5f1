"""Decoding steps compiled with `torch.compile` and replayed from CUDA graphs."""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType
from typing import Any

import torch

from ..contract.state import DecodingState
from ..contract.supports import Decoding


logger = logging.getLogger(__name__)

Step = Callable[[DecodingState], None]

# Uncaptured steps per shape, in which steps are compiled and libraries allocate their workspaces.
WARM_UP = 2
# How often a step of one decoding and batch size may be compiled: every scale or group has its own shapes.
_RECOMPILATIONS = 1024
# Steps are captured here, since the CUDA graphs of inductor exclude functions that mutate their inputs.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


class CompiledSteps:
    """Compiles the steps of decodings: forward pass, sampling and bookkeeping in one graph, without a break. On a CUDA
    device the compiled step is then captured, see `CapturedStep`.

    Every pair of decoding and batch size has its own compiled function, so that a long-running process never reaches
    PyTorch's recompilation limit, which counts per function. The limit is raised from 8 to 1,024 for the whole
    process.

    Args:
        options: passed to `torch.compile`; by default `fullgraph` is True and `dynamic` is False. With the backend
            "eager" the operators are not compiled, and only the overhead of launching them is saved.
    """

    def __init__(self, **options):
        if options.get("mode") in _WITHOUT_GRAPHS:
            options["mode"] = _WITHOUT_GRAPHS[options["mode"]]
        self._options = {"fullgraph": True, "dynamic": False, **options}
        self._compiled: dict[Hashable, Callable] = {}
        # One stream and one memory pool per device, for all graphs.
        self._places: dict[torch.device, tuple[torch.cuda.Stream, Any]] = {}
        # The decodings and batch sizes whose steps could not be captured.
        self._eager: set[Hashable] = set()
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _RECOMPILATIONS)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _RECOMPILATIONS)

    def __str__(self) -> str:
        options = (f"{name}={getattr(value, '__name__', value)}" for name, value in sorted(self._options.items()))
        return f"compiled with {', '.join(options)}"

    def __call__(self, decoding: Decoding, state: DecodingState) -> Step:
        """The function that takes the steps of `state`, which `decoding` has started."""
        key = type(decoding), len(state.seeds)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(_copy_of(type(decoding).step), **self._options)
        step = partial(self._compiled[key], decoding)
        if not state.seeds.is_cuda or key in self._eager:
            return step
        device = state.seeds.device
        if device not in self._places:
            self._places[device] = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        return CapturedStep(step, device, *self._places[device], lambda: self._eager.add(key))


class CapturedStep:
    """Takes the steps of one state on a CUDA device: captures a CUDA graph per shape, and replays it from then on.

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
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._taken = Counter()
        self._failed = False

    def __call__(self, state: DecodingState) -> None:
        shape = state.step_shape
        if shape is None or self._failed:
            self._step(state)
        elif shape in self._graphs:
            self._graphs[shape].replay()
        elif self._taken[shape] < WARM_UP:
            self._taken[shape] += 1
            self._warm_up(state)
        else:
            self._capture(state, shape)
            self(state)

    def _capture(self, state: DecodingState, shape: Hashable) -> None:
        graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
        # A kernel that the garbage collector unloads would end the capture.
        gc.collect()
        gc.disable()
        try:
            # Other threads may use the device during the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._step(state)
            self._graphs[shape] = graph
        except RuntimeError as error:
            logger.warning("steps are not replayed from CUDA graphs, since a capture failed: %s", error)
            self._failed = True
            self._on_failure()
        finally:
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
