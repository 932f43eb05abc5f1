"""Steps that are compiled by `torch.compile`, and replayed from CUDA graphs."""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial

import torch

from ..contract.state import DecodingState
from ..contract.supports import Decoding


Step = Callable[[DecodingState], None]

# Steps of a shape before it is captured. They compile, and let libraries allocate what they keep.
WARM_UP = 2
# Every shape is compiled on its own: a next-scale model alone has ten.
_RECOMPILATIONS = 64
# Steps are captured here, since the CUDA graphs of inductor exclude whatever writes its inputs.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


class CompiledSteps:
    """Compiles the steps of decodings: forward pass, sampling and bookkeeping in one graph, without a break. On a CUDA
    device the compiled step is then captured, see `CapturedStep`.

    A step is compiled again for every decoding, model and shape. PyTorch gives up after 8 times; here the limit is
    raised to 64, for the whole process.

    Args:
        options: those of `torch.compile`; `fullgraph` is True and `dynamic` False where they are not given. With the
            backend "eager" the operators stay as they are and only their launches are saved, without compilation.
    """

    def __init__(self, **options):
        if options.get("mode") in _WITHOUT_GRAPHS:
            options["mode"] = _WITHOUT_GRAPHS[options["mode"]]
        self._options = {"fullgraph": True, "dynamic": False, **options}
        self._compiled: dict[type, Callable] = {}
        limits = torch._dynamo.config
        limits.recompile_limit = max(limits.recompile_limit, _RECOMPILATIONS)

    def __call__(self, decoding: Decoding, state: DecodingState) -> Step:
        """The function that takes the steps of `state`, which `decoding` started."""
        method = type(decoding)
        if method not in self._compiled:
            self._compiled[method] = torch.compile(method.step, **self._options)
        step = partial(self._compiled[method], decoding)
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
