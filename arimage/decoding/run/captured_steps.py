"""Decoding steps that are compiled, captured in CUDA graphs, and replayed in one call after the other."""

import contextlib
import copy
import gc
import logging
import os
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..contract.state import DecodingState, LockstepState, held_tensors
from ..contract.supports import Decoding
from .step_key import Program, StepKey


logger = logging.getLogger(__name__)

# How many steps of a variant are taken before one is captured: in them steps are compiled, and libraries allocate
# their workspaces. The second number is for states whose images are all at the same step.
WARM_UP, WARM_UP_ONCE = 2, 1
# How many bytes kept states may take, and which share of the memory that a CUDA device has left without them.
KEPT_BYTES, KEPT_SHARE = 8 << 30, 0.5
# How often a step of one decoding and batch size may be compiled: every scale or group has its own variants.
_RECOMPILATIONS = 1024
# Steps are captured here, since the CUDA graphs of inductor exclude functions that mutate their inputs.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
# Inductor's options by default: the rotation of a part of each head takes fewer kernels.
_ON_GPU = {"force_pointwise_cat": True}


@dataclass
class CaptureStream:
    """What steps are captured on: one stream and one memory pool for all graphs that run on one stream, since none
    reads what another left there. CUDA records whatever is launched on it meanwhile, so its users take the `lock`."""

    stream: torch.cuda.Stream
    pool: Any = field(default_factory=torch.cuda.graph_pool_handle)
    lock: threading.Lock = field(default_factory=threading.Lock)


class CapturedSteps:
    """The steps of a pipeline's calls: forward pass, sampling and bookkeeping, compiled or not, and on a CUDA device
    captured, see `CapturedState`.

    A batch takes a state from here, and gives it back for calls with the same `StepKey` when its images are finished.
    A state in use is not here, so calls of several threads, or inside each other, never share one. A copy has the same
    settings and keeps nothing.

    Every pair of decoding and batch size has its own compiled function, so that a long-running process never reaches
    PyTorch's recompilation limit, which counts per function. The limit is raised from 8 to 1,024 for the whole
    process.

    With the environment variable ARIMAGE_CHECK_GRAPHS=n every nth replay of a state is compared with an eager step,
    which finds what a step depends on and no `StepKey` holds.

    Args:
        compiles: False captures steps as they are.
        kept_bytes: how much memory the states of finished calls may take; those that were not used for the longest
            time are freed first.
        options: passed to `torch.compile`; by default `fullgraph` is True and `dynamic` is False. With the backend
            "eager" the operators are not compiled, and only the overhead of launching them is saved.

    Attributes:
        program: the networks of the steps. States with steps of another one are not kept.
    """

    def __init__(self, *, compiles: bool = True, kept_bytes: int = KEPT_BYTES, **options):
        if options.get("mode") in _WITHOUT_GRAPHS:
            options["mode"] = _WITHOUT_GRAPHS[options["mode"]]
        self.compiles, self._options = compiles, {"fullgraph": True, "dynamic": False, **options}
        if not isinstance(kept_bytes, Integral) or isinstance(kept_bytes, bool) or kept_bytes < 0:
            raise ValueError(f"kept_bytes is {kept_bytes!r}: give a whole number of bytes, 0 to keep nothing")
        self.kept_bytes = kept_bytes
        self.check_every = int(os.environ.get("ARIMAGE_CHECK_GRAPHS", "0"))
        self.program = Program([])
        # The compiled functions, by decoding and batch size, and those whose steps could not be captured.
        self._functions: dict[Hashable, Callable] = {}
        self._uncapturable: set[Hashable] = set()
        # By device and by the stream that replays the graphs.
        self._streams: dict[Hashable, CaptureStream] = {}
        # What is kept, and with it what is in use.
        self._kept: OrderedDict[StepKey, CapturedState] = OrderedDict()
        self._states: weakref.WeakSet[CapturedState] = weakref.WeakSet()
        self._lock = threading.RLock()
        if compiles:
            limits = torch._dynamo.config
            limits.recompile_limit = max(limits.recompile_limit, _RECOMPILATIONS)
            limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _RECOMPILATIONS)

    def __reduce__(self):
        settings = {"compiles": self.compiles, "kept_bytes": self.kept_bytes, **self._options}
        return partial(type(self), **settings), ()

    def __str__(self) -> str:
        if not self.compiles:
            return "captured"
        options = (f"{name}={getattr(value, '__name__', value)}" for name, value in sorted(self._options.items()))
        return f"compiled with {', '.join(options)}"

    @property
    def kept(self) -> list["CapturedState"]:
        """The kept states, the latest last."""
        return list(self._kept.values())

    @property
    def uncaptured(self) -> int:
        """How many variants of steps have not come often enough to be captured."""
        with self._lock:
            return sum(each.uncaptured for each in list(self._states))

    def use(self, networks: Iterable[nn.Module]) -> Program:
        """Called before steps with the networks that they call. If these are another `Program` now, kept states are
        freed, and those in use are not kept."""
        with self._lock:
            program = self.program.renewed(networks)
            if program is not self.program:
                self.program = program
                self._uncapturable.clear()
                self.clear()
            return program

    def take(self, decoding: Decoding, lanes: int, state: DecodingState) -> "CapturedState":
        """A kept state for the images of `state`, which `decoding` has started and which gets so many `lanes`. If
        there is none, `state` itself."""
        # Its steps can be captured, and its model says what images must have in common to use it one after another.
        keeps = state.model.put_key is not None and not state.over and state.step_variant is not None
        with self._lock:
            kept = self._kept.pop(StepKey.of(decoding, lanes, self.program, state), None) if keeps else None
            if kept is None:
                kept = CapturedState(self, decoding, state, keeps)
                self._states.add(kept)
            return kept

    def give_back(self, captured: "CapturedState") -> None:
        """Keep a state whose lanes are all free for the calls to come, if there is room for it."""
        with self._lock:
            if not captured.keeps or captured.failed or captured.program is not self.program:
                return
            state = captured.state
            # The images may have been interrupted.
            state.finish()
            # Of the state as it is now, since images that joined may have brought settings and longer prompts.
            key = StepKey.of(captured.decoding, len(state.seeds), self.program, state)
            self._kept.pop(key, None)
            self._kept[key] = captured
            sizes = {name: each.nbytes for name, each in self._kept.items()}
            most = min(self.kept_bytes, _room(state.seeds.device, sum(sizes.values())))
            while sum(sizes.values()) > most:
                name, _ = self._kept.popitem(last=False)
                del sizes[name]

    def clear(self) -> bool:
        """Free all kept states; returns whether there were any."""
        with self._lock:
            any_left = bool(self._kept)
            self._kept.clear()
            return any_left

    def function_of(self, decoding: Decoding, state: DecodingState) -> tuple[Callable, CaptureStream | None]:
        """What takes a step of `state`, and on what it is captured, if it is."""
        key, step = (type(decoding), len(state.seeds)), decoding.step
        with self._lock:
            if self.compiles:
                if key not in self._functions:
                    self._functions[key] = self._compile(type(decoding).step, state.seeds.is_cuda)
                step = partial(self._functions[key], decoding)
            if not state.seeds.is_cuda or key in self._uncapturable:
                return step, None
            device = state.seeds.device
            user = device, torch.cuda.current_stream(device).cuda_stream
            if user not in self._streams:
                self._streams[user] = CaptureStream(torch.cuda.Stream(device))
            return step, self._streams[user]

    def fail(self, decoding: Decoding, state: DecodingState, error: RuntimeError) -> None:
        """Called when a capture has failed."""
        logger.warning("steps are not replayed from CUDA graphs, since a capture failed: %s", error)
        with self._lock:
            if isinstance(error, torch.OutOfMemoryError):
                # It may succeed in the next call.
                self.clear()
            else:
                self._uncapturable.add((type(decoding), len(state.seeds)))

    def _compile(self, step: Callable, on_gpu: bool) -> Callable:
        options = self._options
        if on_gpu and options.keys().isdisjoint(("backend", "mode", "options")):
            options = {**options, "options": dict(_ON_GPU)}
        return torch.compile(_copy_of(step), **options)


class Capture(NamedTuple):
    """A CUDA graph, by how much its step raises `head_calls` of the state, and the memory that it took."""

    graph: torch.cuda.CUDAGraph
    head_calls: int
    nbytes: int


class CapturedState:
    """A state and its captured steps: on a CUDA device a CUDA graph per `DecodingState.step_variant`.

    A replay runs the same kernels on the same memory, without Python, so the tensors of the state, its model and its
    cache stay the same objects while their contents change. If a capture fails, the steps go on without graphs.

    A variant is captured when it comes for the third time, in place of an eager step, which its first replay launches:
    so a call launches the kernels of an eager one, none of them twice. In a state whose images are all at the same
    step (next-scale, groups, sets), where most variants come once per image, it is captured when it comes for the
    second time, usually in the second call: a single call captures nothing that it would not replay.

    Args:
        steps: where it is from.
        decoding: takes the steps of `state`.
        keeps: whether further calls may use it.

    Attributes:
        program: what its steps run.
        failed: whether a capture has failed.
    """

    def __init__(self, steps: CapturedSteps, decoding: Decoding, state: DecodingState, keeps: bool):
        self.decoding, self.state, self.keeps, self._steps = decoding, state, keeps, steps
        self._lockstep = isinstance(state, LockstepState)
        self.forget()

    def forget(self) -> None:
        """Capture steps again: tensors that they use have been replaced."""
        self.program, self.failed = self._steps.program, False
        # What takes a step, and the `CaptureStream`; looked up by the first one, for the lanes that there are then.
        self._function: tuple[Callable, CaptureStream | None] | None = None
        self._captures: dict[Hashable, Capture] = {}
        self._taken = Counter()
        self._replays = 0

    def renew(self) -> None:
        """Capture steps again if they run another program now."""
        if self.program is not self._steps.program:
            self.forget()

    @property
    def nbytes(self) -> int:
        """Its memory: that of the state and that of the graphs."""
        return self.state.nbytes + sum(capture.nbytes for capture in self._captures.values())

    @property
    def uncaptured(self) -> int:
        """How many variants have not come often enough to be captured."""
        return 0 if self.failed else len(self._taken) - len(self._captures)

    def step(self) -> bool:
        """Take a step. Returns whether it was replayed."""
        if self._function is None:
            self._function = self._steps.function_of(self.decoding, self.state)
        step, on = self._function
        if on is None or self.failed or (variant := self.state.step_variant) is None:
            step(self.state)
            return False
        if variant not in self._captures:
            with on.lock, _without_autocast_cache():
                if self._taken[variant] < (WARM_UP_ONCE if self._lockstep else WARM_UP):
                    self._taken[variant] += 1
                    self._warm_up(step, on)
                    return False
                self._capture(step, on, variant)
            if self.failed:
                step(self.state)
                return False
        self._replay(step, self._captures[variant])
        return True

    def _warm_up(self, step: Callable, on: CaptureStream) -> None:
        """Take a step on the capture stream."""
        current = torch.cuda.current_stream(self.state.seeds.device)
        on.stream.wait_stream(current)
        with torch.cuda.stream(on.stream):
            step(self.state)
        current.wait_stream(on.stream)

    def _capture(self, step: Callable, on: CaptureStream, variant: Hashable) -> None:
        """Capture the next step, which runs nothing."""
        graph, state, device = torch.cuda.CUDAGraph(), self.state, self.state.seeds.device
        calls, reserved = state.head_calls, torch.cuda.memory_reserved(device)
        taken = state.taken if isinstance(state, LockstepState) else 0
        try:
            # `graph` leaves its stream current if it fails. Other threads may use the device during the capture.
            with (
                _without_garbage_collection(),
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(graph, pool=on.pool, stream=on.stream, capture_error_mode="thread_local"),
            ):
                step(state)
            nbytes = max(torch.cuda.memory_reserved(device) - reserved, 0)
            self._captures[variant] = Capture(graph, state.head_calls - calls, nbytes)
        except RuntimeError as error:
            self.failed = True
            self._steps.fail(self.decoding, state, error)
        finally:
            if isinstance(state, LockstepState):
                state.taken = taken
            if state.head_calls != calls:
                state.head_calls = calls

    def _replay(self, step: Callable, capture: Capture) -> None:
        self._replays += 1
        state, every = self.state, self._steps.check_every
        if every and self._replays % every == 0:
            self._check(step, capture)
        else:
            capture.graph.replay()
        if capture.head_calls:
            state.head_calls += capture.head_calls
        if isinstance(state, LockstepState):
            state.taken += 1

    def _check(self, step: Callable, capture: Capture) -> None:
        """Replay a step, and compare what it writes with what an eager one writes.

        Raises:
            RuntimeError: if they differ by more than rounding.
        """
        state = self.state
        # Expanded tensors cannot be written.
        held = [each for each in held_tensors(state) if 0 not in each.stride()]
        before, counters = [each.clone() for each in held], copy.copy(vars(state))
        step(state)
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


def _room(device: torch.device, kept: int) -> float:
    """How many bytes states may take on a device where `kept` bytes are taken by states."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return KEPT_SHARE * (free + unused + kept)


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
