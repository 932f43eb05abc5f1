"""States of finished calls, whose memory and CUDA graphs further calls use."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

import torch

from ..contract.state import DecodingState
from .step_key import StepKey
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
    """Keeps the states of finished calls by what calls must have in common to share one, their `StepKey`. A state in
    use is not in here, so calls of several threads never share one.

    Args:
        most: how many bytes all states may take; those that were not used for the longest time are freed first.

    Attributes:
        cleared: how often all states were freed. Graphs that were captured before belong to other weights, or took
            memory that was needed elsewhere: their states are not kept.
    """

    def __init__(self, most: int):
        self._most, self.cleared = most, 0
        self._states: OrderedDict[StepKey, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._states)

    def take(self, key: StepKey) -> Kept | None:
        """Remove and return the state with this key, if there is one."""
        with self._lock:
            return self._states.pop(key, None)

    def keep(self, key: StepKey, kept: Kept) -> None:
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
