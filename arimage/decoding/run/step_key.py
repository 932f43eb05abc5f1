"""What identifies a step: two steps with equal keys launch the same kernels, on weights at the same addresses."""

import itertools
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules

from ...kernels.divided import is_divided
from ..contract.distribution import OPTIONAL, PER_LANE
from ..contract.state import DecodingState
from ..contract.supports import Decoding


# Attributes that every module has, of which only this one changes what it computes.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class Program:
    """The networks that steps run, as they are now: each module with its type, its `forward`, and what its attributes
    hold; the weights by their addresses. A graph computes with all of this as it was when it was captured. Two
    programs are equal only if they are one object, see `renewed`.

    What a module reads elsewhere, such as a variable of its Python module, is not seen.

    Args:
        networks: those that steps call.

    Attributes:
        needs_python: whether steps can be neither captured nor compiled: a module has forward hooks, or weights are
            divided among processes, whose exchange has not been captured on a GPU yet.
    """

    def __init__(self, networks: Iterable[nn.Module]):
        parts = list(dict.fromkeys(itertools.chain.from_iterable(each.modules() for each in networks)))
        tensors = list(tensors_of(parts))
        self.needs_python = (
            bool(modules._global_forward_hooks or modules._global_forward_pre_hooks)
            or any(each._forward_hooks or each._forward_pre_hooks for each in parts)
            or any(map(is_divided, tensors))
        )
        # Objects that are known by their ids, which others would get if these were gone, and what they hold.
        self._objects: dict[int, tuple[Any, Hashable]] = {}
        self._content = (
            self.needs_python,
            tuple((id(each), type(each), type(each).forward, self._attributes(each)) for each in parts),
            tuple(map(_address, tensors)),
        )
        self._alive = [weakref.ref(each) for each in (*parts, *tensors)]

    def renewed(self, networks: Iterable[nn.Module]) -> "Program":
        """This program if `networks` are still what it is, else theirs."""
        now = Program(networks)
        # Another module or tensor may have the place of one that is gone.
        same = now._content == self._content and all(known() is not None for known in self._alive)
        return self if same else now

    def _attributes(self, module: nn.Module) -> tuple:
        own = vars(module)
        return tuple((name, self._value(own[name])) for name in own if name not in _OF_EVERY_MODULE)

    def _value(self, value: Any, inside: bool = False) -> Hashable:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Mapping):
            return tuple((key, self._value(each, inside)) for key, each in value.items())
        if isinstance(value, list | tuple | set | frozenset):
            return tuple(self._value(each, inside) for each in value)
        if id(value) not in self._objects:
            content = None
            if isinstance(value, torch.Tensor):
                content = _address(value)
            elif not inside and not isinstance(value, nn.Module | type):
                # What a configuration, a processor of attention or the like holds, which may be changed in place.
                content = self._value(getattr(value, "__dict__", {}), True)
            self._objects[id(value)] = value, content
        return type(value), id(value), self._objects[id(value)][1]


@dataclass(frozen=True)
class StepKey:
    """What images must have in common to use the memory and the graphs of one state after each other.

    Attributes:
        decoding, lanes: the decoding, and how many images are generated at once.
        program: what steps run.
        model: what the model is bound to that steps are made for, its `put_key`.
        shapes: of the tensors of the state.
        structure: the values of the state that steps are made for.
        sampling: which of the settings that a stack has per lane are computed at all, since they are then computed for
            all images; and all other settings.
        modes: those of PyTorch, and the stream that graphs run on, see `modes`.
    """

    decoding: Decoding
    lanes: int
    program: Program
    model: Hashable
    shapes: tuple
    structure: tuple
    sampling: tuple
    modes: tuple

    @classmethod
    def of(cls, decoding: Decoding, lanes: int, program: Program, state: DecodingState) -> "StepKey":
        """The key of the steps of a state as it is now."""
        sampling = state.sampling
        computed = tuple(name for name in OPTIONAL if sampling.in_effect(name) is not None)
        others = tuple(getattr(sampling, each.name) for each in fields(sampling) if each.name not in PER_LANE)
        return cls(
            decoding=decoding,
            lanes=lanes,
            program=program,
            model=state.model.put_key,
            shapes=state.shapes,
            structure=tuple((name, getattr(state, name)) for name in sorted(state.structure)),
            sampling=(computed, others),
            modes=modes(state.seeds.device),
        )


def modes(device: torch.device) -> tuple:
    """The modes of PyTorch that change what a step computes on a device, or which tensors it leaves behind, and the
    stream that its graphs run on: they share memory, so they may not run at the same time."""
    kind, cuda = device.type, torch.backends.cuda
    matmul = cuda.matmul
    return (
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        (matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision),
        (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction),
        (torch.backends.cudnn.enabled, torch.backends.cudnn.deterministic, torch.backends.mkldnn.enabled),
        (
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        torch.cuda.current_stream(device).cuda_stream if kind == "cuda" else None,
    )


def tensors_of(parts: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """The parameters and buffers that modules have themselves. Quantised ones, which may have no address of their own,
    are followed by the tensors that they consist of."""
    own = (each for part in parts for each in (*part._parameters.values(), *part._buffers.values()))
    waiting = [each for each in own if each is not None]
    while waiting:
        tensor = waiting.pop()
        yield tensor
        if hasattr(tensor, "__tensor_flatten__"):
            waiting += [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        state = getattr(tensor, "quant_state", None)
        if state is not None:
            # Packed weights of bitsandbytes.
            waiting += [each for each in vars(state).values() if isinstance(each, torch.Tensor)]


def _address(tensor: torch.Tensor) -> tuple:
    return id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape
