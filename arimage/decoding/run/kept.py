"""States of finished calls, whose memory and CUDA graphs further calls use."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, fields

import torch

from ..contract.distribution import OPTIONAL, PER_LANE
from ..contract.state import DecodingState
from ..contract.supports import Decoding
from .taker import StepTaker
from .watch import Watch


# Kept states take at most this share of the memory that a CUDA device has left without them.
SHARE = 0.5


@dataclass
class Kept:
    """A state whose images are all finished, what takes its steps, and its watch.

    Attributes:
        began: the `KeptStates.cleared` of the moment when its steps were compiled or captured.
    """

    state: DecodingState
    take_step: StepTaker
    watch: Watch
    began: int

    @property
    def nbytes(self) -> int:
        """Its memory: the state and the graphs of its steps."""
        return self.state.nbytes + self.take_step.nbytes


class KeptStates:
    """Keeps the states of finished calls by what calls must have in common to share one, see `key_of`. A state in use
    is not in here, so calls of several threads never share one.

    Args:
        most: how many bytes all states may take; those that were not used for the longest time are freed first.

    Attributes:
        cleared: how often all states were freed. Graphs that were captured before belong to other weights, or took
            memory that was needed elsewhere: their states are not kept.
    """

    def __init__(self, most: int):
        self._most, self.cleared = most, 0
        self._states: OrderedDict[Hashable, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def take(self, key: Hashable) -> Kept | None:
        """Remove and return the state with this key, if there is one."""
        with self._lock:
            return self._states.pop(key, None)

    def keep(self, key: Hashable, kept: Kept) -> None:
        """Keep a state until a call takes it, or there is no room for it."""
        with self._lock:
            if kept.began != self.cleared:
                return
            self._states.pop(key, None)
            self._states[key] = kept
            sizes = {name: each.nbytes for name, each in self._states.items()}
            most = min(self._most, room_for(kept.state.seeds.device, sum(sizes.values())))
            while sum(sizes.values()) > most:
                name, _ = self._states.popitem(last=False)
                del sizes[name]

    def clear(self) -> bool:
        """Free all states; returns whether there were any."""
        with self._lock:
            any_left = bool(self._states)
            self._states.clear()
            self.cleared += 1
            return any_left


def room_for(device: torch.device, kept: int) -> float:
    """How many bytes states may take on a device where `kept` bytes are taken by states."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return SHARE * (free + unused + kept)


def can_be_kept(state: DecodingState) -> bool:
    """Whether further images may use the memory and the graphs of a state that has just been started: its steps can be
    captured, and its model says what they must have in common."""
    return state.model.put_key is not None and not state.over and state.step_shape is not None


def key_of(decoding: Decoding, size: int, state: DecodingState) -> Hashable:
    """What images must have in common to use the memory and the graphs of a state with `size` lanes after each
    other."""
    structure = tuple((name, getattr(state, name)) for name in sorted(state.structure))
    return decoding, size, state.model.put_key, state.shapes, structure, _settings(state), modes(state.seeds.device)


def _settings(state: DecodingState) -> tuple:
    """The sampling settings that steps are made for: which of those that a stack has per lane are computed at all,
    since they are then computed for all images, and all others."""
    sampling = state.sampling
    computed = tuple(name for name in OPTIONAL if sampling.given(name) is not None)
    return computed, tuple(getattr(sampling, each.name) for each in fields(sampling) if each.name not in PER_LANE)


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
