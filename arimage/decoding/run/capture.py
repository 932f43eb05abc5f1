"""Steps that are compiled by `torch.compile`, and replayed from CUDA graphs."""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from types import FunctionType

import torch

from ..contract.state import DecodingState
from ..contract.supports import Decoding


Step = Callable[[DecodingState], None]

# Steps of a shape before it is captured. They compile, and let libraries allocate what they keep.
WARM_UP = 2
# How often a step of one decoding and number of images may be compiled: every scale or group has shapes of its own.
_RECOMPILATIONS = 1024
# Steps are captured here, since the CUDA graphs of inductor exclude whatever writes its inputs.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


class CompiledSteps:
    """Compiles the steps of decodings: forward pass, sampling and bookkeeping in one graph, without a break. On a CUDA
    device the compiled step is then captured, see `CapturedStep`.

    Every decoding and number of images has a compiled function of its own, so that a process which sees more and more
    of them never reaches PyTorch's limit of recompilations, which counts per function. For the whole process the limit
    is raised from 8 to 1,024.

    Args:
        options: those of `torch.compile`; `fullgraph` is True and `dynamic` False where they are not given. With the
            backend "eager" the operators stay as they are and only their launches are saved, without compilation.
    """

    def __init__(self, **options):
        if options.get("mode") in _WITHOUT_GRAPHS:
            options["mode"] = _WITHOUT_GRAPHS[options["mode"]]
        self._options = {"fullgraph": True, "dynamic": False, **options}
        self._compiled: dict[Hashable, Callable] = {}
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _RECOMPILATIONS)
        limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _RECOMPILATIONS)

    def __call__(self, decoding: Decoding, state: DecodingState) -> Step:
        """The function that takes the steps of `state`, which `decoding` started."""
        key = type(decoding), len(state.seeds)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(_copy_of(type(decoding).step), **self._options)
        step = partial(self._compiled[key], decoding)
        return CapturedStep(step, state.seeds.device) if state.seeds.is_cuda else step


class CapturedStep:
    """Takes the steps of one state on a CUDA device: captures the first ones of each shape, and replays them from then
    on.

    A replay runs the same kernels on the same memory and no Python, so the tensors of the state, of its model and of
    its cache must stay the same ones while their contents change. All graphs share a pool of memory: what one leaves
    in it nobody reads.

    Args:
        step: takes a step, without reading the device.
    """

    def __init__(self, step: Step, device: torch.device):
        self._step, self._device = step, device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._taken = Counter()
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, state: DecodingState) -> None:
        shape = state.step_shape
        if shape not in self._graphs:
            if shape is None or self._taken[shape] < WARM_UP:
                self._taken[shape] += 1
                self._warm_up(state)
                return
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._step(state)
            self._graphs[shape] = graph
        self._graphs[shape].replay()

    def _warm_up(self, state: DecodingState) -> None:
        """A step on the stream that captures."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._step(state)
        current.wait_stream(self._stream)


def _copy_of(function: Callable) -> Callable:
    """The same function with code of its own, by which dynamo counts compilations."""
    code, closure = function.__code__.replace(), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
