"""Decoding steps compiled with `torch.compile` and replayed from CUDA graphs."""

import contextlib
import copy
import gc
import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ..contract.admission import held_tensors
from ..contract.state import DecodingState, LockstepState
from ..contract.supports import Decoding
from .kept import KeptStates
from .step_key import Program
from .taker import Step, StepTaker


logger = logging.getLogger(__name__)

# How many steps of a shape are taken before one is captured: in them steps are compiled, and libraries allocate their
# workspaces. The second number is for states whose images are all at the same step, where most shapes come once per
# image.
WARM_UP, WARM_UP_ONCE = 2, 1
KEPT_BYTES = 8 << 30
# How often a step of one decoding and batch size may be compiled: every scale or group has its own shapes.
_RECOMPILATIONS = 1024
# Steps are captured here, since the CUDA graphs of inductor exclude functions that mutate their inputs.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
# Inductor's options by default: the rotation of a part of each head takes fewer kernels.
_ON_GPU = {"force_pointwise_cat": True}


@dataclass
class Place:
    """Where steps are captured: one stream and one memory pool for all graphs that run on one stream. Graphs may share
    the pool, because none of them reads what another left there. CUDA records whatever is launched on a capturing
    stream, so one thread at a time uses it, with the `lock`."""

    stream: torch.cuda.Stream
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    lock: threading.Lock = field(default_factory=threading.Lock)


class CompiledSteps:
    """Compiles the steps of decodings: forward pass, sampling and bookkeeping in one graph, without a break. On a CUDA
    device the step, compiled or not, is then captured, see `CapturedStep`. States of finished calls are kept with
    their captures, see `KeptStates`. A copy, or a pickled one, has the same settings and keeps nothing.

    Every pair of decoding and batch size has its own compiled function, so that a long-running process never reaches
    PyTorch's recompilation limit, which counts per function. The limit is raised from 8 to 1,024 for the whole
    process.

    With the environment variable ARIMAGE_CHECK_GRAPHS=n every nth replay of a state is compared with an eager step,
    which finds what a step depends on and no `StepKey` holds.

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
        if not isinstance(kept_bytes, Integral) or isinstance(kept_bytes, bool) or kept_bytes < 0:
            raise ValueError(f"kept_bytes is {kept_bytes!r}: give a whole number of bytes, 0 to keep nothing")
        self._kept_bytes = kept_bytes
        self._compiled: dict[Hashable, Callable] = {}
        # By device and by the stream that replays the graphs.
        self._places: dict[Hashable, Place] = {}
        # Those of kept states, and of states in use.
        self._captured: weakref.WeakSet[CapturedStep] = weakref.WeakSet()
        # The decodings and batch sizes whose steps could not be captured.
        self._eager: set[Hashable] = set()
        self.kept = KeptStates(kept_bytes)
        self.program = Program([])
        self._lock = threading.Lock()
        self._check_every = int(os.environ.get("ARIMAGE_CHECK_GRAPHS", "0"))
        if compiles:
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, _RECOMPILATIONS)
            limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _RECOMPILATIONS)

    def __reduce__(self):
        settings = {"compiles": self.compiles, "kept_bytes": self._kept_bytes, **self._options}
        return partial(type(self), **settings), ()

    def __str__(self) -> str:
        if not self.compiles:
            return "captured"
        options = (f"{name}={getattr(value, '__name__', value)}" for name, value in sorted(self._options.items()))
        return f"compiled with {', '.join(options)}"

    def use(self, networks: Iterable[nn.Module]) -> Program:
        """Called before steps with the networks that they call. If these are another `Program` now, kept states are
        freed, and those in use are not kept."""
        with self._lock:
            program = self.program.renewed(networks)
            if program is not self.program:
                self.kept.clear()
                self._eager.clear()
                self.program = program
            return program

    def __call__(self, decoding: Decoding, state: DecodingState) -> StepTaker:
        """What takes the steps of `state`, which `decoding` has started."""
        key, step = (type(decoding), len(state.seeds)), decoding.step
        with self._lock:
            if self.compiles:
                if key not in self._compiled:
                    self._compiled[key] = self._compile(type(decoding).step, state.seeds.is_cuda)
                step = partial(self._compiled[key], decoding)
            if not state.seeds.is_cuda or key in self._eager:
                return StepTaker(step)
            device = state.seeds.device
            user = device, torch.cuda.current_stream(device).cuda_stream
            if user not in self._places:
                self._places[user] = Place(torch.cuda.Stream(device))
            captured = CapturedStep(step, device, self._places[user], partial(self._failed, key), self._check_every)
            self._captured.add(captured)
            return captured

    def _compile(self, step: Callable, on_gpu: bool) -> Callable:
        options = self._options
        if on_gpu and options.keys().isdisjoint(("backend", "mode", "options")):
            options = {**options, "options": dict(_ON_GPU)}
        return torch.compile(_copy_of(step), **options)

    @property
    def uncaptured(self) -> int:
        """How many shapes of steps have not come often enough to be captured."""
        with self._lock:
            return sum(each.uncaptured for each in list(self._captured))

    def _failed(self, key: Hashable, error: RuntimeError) -> None:
        """Called when a capture has failed."""
        if isinstance(error, torch.OutOfMemoryError):
            # It may succeed in the next call.
            self.kept.clear()
        else:
            with self._lock:
                self._eager.add(key)


@dataclass
class Capture:
    """A CUDA graph, by how much its step raises `head_calls` of the state, and the memory that it took."""

    graph: torch.cuda.CUDAGraph
    head_calls: int
    nbytes: int


class CapturedStep(StepTaker):
    """Takes the steps of one state on a CUDA device: captures a CUDA graph per `DecodingState.step_shape`, and replays
    it from then on.

    A replay runs the same kernels on the same memory, without Python, so the tensors of the state, its model and its
    cache must stay the same objects while their contents change. If a capture fails, which changes nothing, the steps
    go on without graphs.

    A shape is captured when it comes for the third time, in place of an eager step: a capture records what that step
    would have launched, and its first replay launches it. So the kernels of a call are those of an eager one, none is
    launched twice, and what comes on top is, per shape, that the host waits for the device once and CUDA builds the
    graph. In a state whose images are all at the same step (next-scale, groups, sets), most shapes come once per
    image. They are captured when they come for the second time, which is usually in the second call of the kind:
    a single call captures nothing that it would not replay, and its states are kept with what they have counted.

    Args:
        step: the function to capture, which must not read the device.
        on_failure: called when a capture has failed.
        check_every: every how many replays one is compared with an eager step, or 0.
    """

    def __init__(
        self,
        step: Step,
        device: torch.device,
        place: Place,
        on_failure: Callable[[RuntimeError], None],
        check_every: int = 0,
    ):
        super().__init__(step)
        self._device, self._place, self._on_failure = device, place, on_failure
        self._check_every = check_every
        self._captures: dict[Hashable, Capture] = {}
        self._taken = Counter()

    @property
    def nbytes(self) -> int:
        """The memory that the graphs took."""
        return sum(capture.nbytes for capture in self._captures.values())

    @property
    def uncaptured(self) -> int:
        """How many shapes have not come often enough to be captured."""
        return 0 if self.failed else len(self._taken) - len(self._captures)

    def __call__(self, state: DecodingState) -> None:
        shape = state.step_shape
        if shape is not None and shape not in self._captures and not self.failed:
            with self._place.lock, _without_autocast_cache():
                if self._taken[shape] < (WARM_UP_ONCE if isinstance(state, LockstepState) else WARM_UP):
                    self._taken[shape] += 1
                    self._warm_up(state)
                    return
                self._capture(state, shape)
        if shape in self._captures and not self.failed:
            self._replay(state, self._captures[shape])
        else:
            self._step(state)

    def _replay(self, state: DecodingState, capture: Capture) -> None:
        self.replays += 1
        if self._check_every and self.replays % self._check_every == 0:
            self._check(state, capture)
        else:
            capture.graph.replay()
        if capture.head_calls:
            state.head_calls += capture.head_calls
        if isinstance(state, LockstepState):
            state.taken += 1

    def _check(self, state: DecodingState, capture: Capture) -> None:
        """Replay a step, and compare what it writes with what an eager one writes.

        Raises:
            RuntimeError: if they differ by more than rounding.
        """
        # Expanded tensors cannot be written.
        held = [each for each in held_tensors(state) if 0 not in each.stride()]
        before, counters = [each.clone() for each in held], copy.copy(vars(state))
        self._step(state)
        expected = [each.clone() for each in held]
        vars(state).update(counters)
        for tensor, content in zip(held, before, strict=True):
            tensor.copy_(content)
        capture.graph.replay()
        for tensor, content, eager in zip(held, before, expected, strict=True):
            # What steps only leave behind, such as indices of a cache, is a new tensor in an eager one.
            if not torch.equal(content, eager) and not _close(tensor, eager):
                raise RuntimeError(
                    f"a replayed step of {type(state).__name__} writes another tensor {tuple(tensor.shape)} than an "
                    "eager one: it depends on something that no `StepKey` holds. Set ARIMAGE_EAGER=1, and report it"
                )

    def _capture(self, state: DecodingState, shape: Hashable) -> None:
        """Capture the next step, which runs nothing."""
        graph = torch.cuda.CUDAGraph()
        calls, reserved = state.head_calls, torch.cuda.memory_reserved(self._device)
        taken = state.taken if isinstance(state, LockstepState) else 0
        try:
            # `graph` leaves its stream current if it fails. Other threads may use the device during the capture.
            with (
                _without_garbage_collection(),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                torch.cuda.graph(
                    graph, pool=self._place.pool, stream=self._place.stream, capture_error_mode="thread_local"
                ),
            ):
                self._step(state)
            nbytes = max(torch.cuda.memory_reserved(self._device) - reserved, 0)
            self._captures[shape] = Capture(graph, state.head_calls - calls, nbytes)
        except RuntimeError as error:
            logger.warning("steps are not replayed from CUDA graphs, since a capture failed: %s", error)
            self.failed = True
            self._on_failure(error)
        finally:
            if isinstance(state, LockstepState):
                state.taken = taken
            if state.head_calls != calls:
                state.head_calls = calls

    def _warm_up(self, state: DecodingState) -> None:
        """Take a step on the capture stream."""
        current = torch.cuda.current_stream(self._device)
        self._place.stream.wait_stream(current)
        with torch.cuda.stream(self._place.stream):
            self._step(state)
        current.wait_stream(self._place.stream)


def _close(tensor: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors differ by no more than the rounding of half precision."""
    if not expected.is_floating_point():
        return torch.equal(tensor, expected)
    return torch.allclose(tensor.float(), expected.float(), rtol=0.02, atol=0.02, equal_nan=True)


# The garbage collector is one for all threads.
_COLLECTOR = threading.Lock()


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A kernel that the garbage collector unloads would end a capture."""
    with _COLLECTOR:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


@contextlib.contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Let autocast cast weights again in every step: a graph would read casts that are freed when its block ends."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


def _copy_of(function: Callable) -> Callable:
    """A copy of the function with its own code object, since dynamo counts compilations per code object."""
    code, closure = function.__code__.replace(), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
