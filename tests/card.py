"""An accelerator without one: tensors that say `cuda:0` and hold a CPU tensor, and CUDA graphs that are tapes of
operators.

    pipe = card.move(pipe)
    with card.card() as device:
        pipe("a red heart")
    print(device.captures, device.replays, device.waits)

The code that is tested takes its CUDA branches as it is, since tensors answer for themselves where they are. Operators
run on the CPU, operations of `arimage.kernels` as their definitions in torch, and `torch.compile` returns what it was
given. What a CUDA device refuses, or gets wrong without a word, raises a `CardError`: tensors of two devices in one
operator, a host that waits in a capture, a graph that uses memory which was freed.

What it cannot show: streams that run at the same time, pinned memory, the caching allocator, the Triton kernels
themselves, and the rounding of a GPU.
"""

import contextlib
import sys
import threading
import weakref
from collections import Counter, defaultdict
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


CPU = torch.device("cpu")
# Operators for which the host waits, since what they return, or its shape, depends on values.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::bincount",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
}
INDEXING = {"aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class CardError(AssertionError):
    """What a CUDA device refuses, or gets wrong without a word. Not a `RuntimeError`, which the code may handle."""


class OnCard(torch.Tensor):
    """A tensor on the card, with the values of `elem` on the CPU."""

    elem: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: torch.Tensor):
        layout = {"strides": elem.stride(), "storage_offset": elem.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(cls, elem.size(), **layout, dtype=elem.dtype, device="cuda:0")
        tensor.elem = elem
        DEVICE.hold(tensor)
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return DEVICE.run(operator, args, kwargs or {})

    def __repr__(self):
        return f"{type(self).__name__}({self.elem})"

    def __deepcopy__(self, memo):
        return self.clone()

    def tolist(self):
        DEVICE.wait("tolist")
        return self.elem.tolist()

    def numpy(self, *_, **__):
        raise TypeError(f"a tensor on {self.device} has no numpy array: copy it to the CPU first")

    __array__ = numpy


class OnXPU(OnCard):
    """A tensor on an accelerator that is not a CUDA device."""

    device = property(lambda self: torch.device("xpu:0"))
    is_cuda = False


KINDS = {"cuda": OnCard, "xpu": OnXPU}


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, or in the results, of an operator."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]


def on_host(value: Any, inputs: list, hosts: list) -> Any:
    """An argument of an operator with the CPU tensors of those on the card, which are added to `inputs`, the others to
    `hosts`."""
    if isinstance(value, OnCard):
        inputs.append(value)
        return value.elem
    if isinstance(value, list | tuple):
        return [on_host(each, inputs, hosts) for each in value]
    if isinstance(value, torch.Tensor) and value.ndim:
        hosts.append(value)
    return value


@cache
def written(operator) -> list[tuple[int, str]]:
    """The arguments that an operator writes, by place and name."""
    arguments = enumerate(operator._schema.arguments)
    return [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]


class Device:
    """The card, of which a process has one.

    Attributes:
        captures, replays: how many graphs were captured, and how often graphs were replayed.
        waits: how often the host waited for the device, by what for and where in the package.
        holders: weak references to the tensors on the card by their memory, which is free without any.
    """

    def __init__(self):
        self.captures = self.replays = 0
        self.waits: Counter[str] = Counter()
        self.holders: defaultdict[int, set] = defaultdict(set)
        # What records, the thread that it records, and whether other threads must not wait meanwhile either.
        self._tape: Tape | None = None
        self._thread, self._everywhere = 0, False

    def hold(self, tensor: OnCard) -> None:
        holders = self.holders[memory_of(tensor.elem)]
        holders.add(weakref.ref(tensor, holders.discard))

    @property
    def tape(self) -> "Tape | None":
        """What records the operators of this thread."""
        return self._tape if self._thread == threading.get_ident() else None

    @contextlib.contextmanager
    def capture(self, tape: "Tape", pool=None, stream=None, capture_error_mode="global"):
        """`torch.cuda.graph`."""
        if self._tape is not None:
            raise CardError("two captures at once")
        self._thread, self._everywhere = threading.get_ident(), capture_error_mode == "global"
        self._tape, self.captures = tape, self.captures + 1
        try:
            yield
        finally:
            self._tape = None
            tape.finish()

    def wait(self, what: str) -> None:
        """Let the host wait for the device."""
        if self.tape is not None or (self._tape is not None and self._everywhere):
            raise CardError(f"{what}: not permitted while a graph is captured")
        frame = sys._getframe(1)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("arimage."):
            frame = frame.f_back
        place = "" if frame is None else f" in {frame.f_globals['__name__']}:{frame.f_lineno}"
        self.waits[what + place] += 1

    def run(self, operator, args: tuple, kwargs: dict):
        """Run an operator on the memory of its tensors. Its results are on the card where they are on a GPU."""
        name = operator if isinstance(operator, str) else operator._schema.name
        inputs: list[OnCard] = []
        hosts: list[torch.Tensor] = []
        host_args = on_host(args, inputs, hosts)
        host_kwargs = {key: on_host(value, inputs, hosts) for key, value in kwargs.items()}
        if host_kwargs.get("device") is not None:
            host_kwargs["device"] = CPU
        # Pinned memory is for copies to a device, and there is none.
        host_kwargs.pop("pin_memory", None)
        if name == "aten::is_pinned":
            return False
        if name in ("aten::_to_copy", "aten::copy_"):
            kind = self._transfer(name, args, kwargs)
        else:
            kind = type(inputs[0]) if inputs else None
            if inputs:
                self._check(name, args, hosts)
            if kwargs.get("device") is not None:
                kind = KINDS.get(kwargs["device"].type)
        function = _sdpa if name == "sdpa" else operator
        if kind is None:
            return function(*host_args, **host_kwargs)
        tape = self.tape
        if tape is not None:
            tape.save(operator, host_args, host_kwargs, [tensor.elem for tensor in inputs])
        results = function(*host_args, **host_kwargs)
        if tape is not None:
            tape.record(function, host_args, host_kwargs, results)
        known = {id(tensor.elem): tensor for tensor in inputs}
        if isinstance(results, list | tuple):
            return type(results)(self._wrap(result, kind, known) for result in results)
        return self._wrap(results, kind, known)

    def _transfer(self, name: str, args: tuple, kwargs: dict) -> type[OnCard] | None:
        """Where a copy goes, for which the host waits if it comes from elsewhere."""
        target, source = (None, args[0]) if name == "aten::_to_copy" else args[:2]
        if target is None:
            device = kwargs.get("device") or source.device
            kind = KINDS.get(device.type)
        else:
            kind = type(target) if isinstance(target, OnCard) else None
        asynchronous = kwargs.get("non_blocking") or (target is not None and args[2:] == (True,))
        if isinstance(source, OnCard) != (kind is not None) and (self.tape is not None or not asynchronous):
            self.wait("copy between host and device")
        return kind

    def _check(self, name: str, args: tuple, hosts: list[torch.Tensor]) -> None:
        """Refuse tensors of two devices, and wait where the host does."""
        if name in INDEXING and isinstance(args[0], OnCard):
            indices = tensors_of(args[1])
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.wait("index that is a mask")
            if any(host is index for host in hosts for index in indices):
                self.wait("index on the host")
            hosts = [host for host in hosts if all(host is not index for index in indices)]
        if hosts:
            raise CardError(f"{name}: tensors on cuda:0 and on the CPU, {tuple(hosts[0].shape)}")
        if name in WAITS:
            self.wait(name)

    def _wrap(self, result: Any, kind: type[OnCard], known: dict[int, OnCard]) -> Any:
        """A result on the card: an operator that returns its argument returns the same tensor."""
        if not isinstance(result, torch.Tensor):
            return result
        tensor = known.get(id(result))
        if tensor is None:
            return kind(result)
        # The stride along a dimension of one place means nothing.
        strides = zip(result.shape, tensor.stride(), result.stride(), strict=True)
        if tensor.shape != result.shape or any(mine != other for size, mine, other in strides if size > 1):
            raise NotImplementedError(f"an operator that changes a shape in place: {tensor.shape}, {result.shape}")
        return tensor


class Tape:
    """A CUDA graph: the operators of a capture, on the memory that they used. A capture runs nothing, so at its end
    that memory is as it was. What was allocated in the capture belongs to a pool that graphs share: between replays it
    holds nothing of use."""

    def __init__(self):
        # Operators, their arguments, and those of their results that are not views of what there was.
        self._calls = []
        # By memory: what was in it before the capture wrote it, and tensors of what others and the capture itself
        # allocated.
        self._before, self._used, self._own = {}, {}, {}
        self._pool: list[torch.Tensor] = []
        self._poison: list[torch.Tensor] = []

    def save(self, operator, args: list, kwargs: dict, tensors: list[torch.Tensor]) -> None:
        """Note what memory an operator is about to use, and its content if it is about to be written."""
        for tensor in tensors:
            if memory_of(tensor) not in self._own:
                self._used.setdefault(memory_of(tensor), tensor)
        for i, name in [] if isinstance(operator, str) else written(operator):
            for tensor in tensors_of(args[i] if i < len(args) else kwargs.get(name)):
                key, memory = memory_of(tensor), tensor.untyped_storage()
                if key not in self._own and key not in self._before:
                    self._before[key] = memory, memory.clone()

    def record(self, function, args: list, kwargs: dict, results: Any) -> None:
        known = self._used.keys() | self._own.keys()
        fresh = [None if memory_of(tensor) in known else tensor for tensor in tensors_of(results)]
        self._own.update({memory_of(tensor): tensor for tensor in fresh if tensor is not None})
        self._calls.append((function, args, kwargs, fresh))

    def finish(self) -> None:
        for memory, content in self._before.values():
            memory.copy_(content)
        self._before.clear()
        for tensor in self._own.values():
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self._pool.append(whole)
            if whole.dtype == torch.bool:
                self._poison.append(torch.arange(len(whole)) % 3 == 0)
            elif whole.is_floating_point() or whole.is_complex():
                self._poison.append(torch.full_like(whole, torch.nan))
            else:
                self._poison.append(torch.full_like(whole, torch.iinfo(whole.dtype).max // 3))
        self._spoil()

    def _spoil(self) -> None:
        if self._pool:
            torch._foreach_copy_(self._pool, self._poison)

    def check_memory(self) -> None:
        """Refuse to use memory that nobody holds any more."""
        for memory, tensor in self._used.items():
            if not DEVICE.holders[memory]:
                raise CardError(f"a graph uses memory that was freed: {tuple(tensor.shape)}, {tensor.dtype}")

    def replay(self) -> None:
        DEVICE.replays += 1
        self.check_memory()
        with _disable_current_modes():
            for function, args, kwargs, fresh in self._calls:
                for old, new in zip(fresh, tensors_of(function(*args, **kwargs)), strict=True):
                    if old is not None:
                        old.copy_(new)
            self._spoil()


DEVICE = Device()


_sdpa = F.scaled_dot_product_attention


def _cast(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.to(torch.get_autocast_dtype("cuda")) if floats else value


def sdpa(query: torch.Tensor, *args, **kwargs):
    """Attention as one operator, which rounds as it does on the CPU."""
    if isinstance(query, OnCard) and torch.is_autocast_enabled("cuda"):
        query, args = _cast(query), tuple(map(_cast, args))
        kwargs = {name: _cast(value) for name, value in kwargs.items()}
    return DEVICE.run("sdpa", (query, *args), kwargs) if isinstance(query, OnCard) else _sdpa(query, *args, **kwargs)


class Mode(TorchDispatchMode):
    """Takes the operators that create tensors on the card."""

    @classmethod
    def _should_skip_dynamo(cls):
        # Nothing is compiled, and to skip it takes time.
        return False

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        return DEVICE.run(operator, args, kwargs or {})

    def __enter__(self):
        # `torch.tensor` creates a CPU tensor first, and copies it.
        self._lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self._lifts)
        return super().__exit__(*error)


class Stream:
    """A stream or an event, of which all is done at once."""

    cuda_stream = 0

    def __init__(self, *_, **__): ...

    def wait_stream(self, stream): ...

    def record(self, stream=None): ...

    def synchronize(self): ...


def _run_thread(thread: threading.Thread) -> None:
    with Mode():
        _thread_run(thread)


_thread_run = threading.Thread.run


def patch_graphs(patch: pytest.MonkeyPatch, graph: type, capture) -> None:
    """Let `graph` and `capture` be what `torch.cuda` captures with, on streams where all is done at once."""
    names = {
        "CUDAGraph": graph,
        "graph": capture,
        "graph_pool_handle": object,
        "Stream": Stream,
        "Event": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (2**40, 2**40),
    }
    for name, value in names.items():
        patch.setattr(torch.cuda, name, value)


@contextlib.contextmanager
def card():
    """The device, for this thread and for those that it starts."""
    torch._C._ensureCUDADeviceGuardSet()
    # Without cuDNN, since `batch_norm` would be an operator that a CPU does not have.
    with pytest.MonkeyPatch.context() as patch, torch.backends.cudnn.flags(enabled=False), Mode():
        patch_graphs(patch, Tape, DEVICE.capture)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.xpu, "_lazy_init", lambda: None)
        patch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: "a card of tapes")
        patch.setattr(torch, "compile", lambda function, **options: function)
        patch.setattr(F, "scaled_dot_product_attention", sdpa)
        patch.setattr(threading.Thread, "run", _run_thread)
        DEVICE.captures = DEVICE.replays = 0
        DEVICE.waits.clear()
        yield DEVICE


def move(pipe, device: str = "cuda"):
    """`pipe.to(device)`."""
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            move_module(part, device)
    return pipe


def move_module(module: torch.nn.Module, device: str = "cuda") -> torch.nn.Module:
    """`module.to(device)`, whose parameters share memory with those on the CPU. Tied ones stay tied."""
    moved = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is None or isinstance(tensor, OnCard):
                    continue
                if id(tensor) not in moved:
                    there = KINDS[device](tensor.detach())
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    moved[id(tensor)] = tensor, torch.nn.Parameter(there, False) if is_parameter else there
                tensors[name] = moved[id(tensor)][1]
    return module
