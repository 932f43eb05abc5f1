"""States of finished calls, whose memory and CUDA graphs further calls use."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields

from ..contract.distribution import LatentSampling
from ..contract.state import DecodingState, LockstepState
from ..contract.supports import Decoding
from .watch import Watch


@dataclass
class Kept:
    """A state whose images are all finished, the function that takes its steps, and its watch."""

    state: DecodingState
    take_step: Callable[[DecodingState], None]
    watch: Watch


class KeptStates:
    """Keeps the states of finished calls by what calls must have in common to share one, see `key_of`. A state in use
    is not in here, so calls of several threads never share one.

    Args:
        most: how many bytes all states may take; those that were not used for the longest time are freed first.
    """

    def __init__(self, most: int):
        self._most = most
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
            self._states.pop(key, None)
            self._states[key] = kept
            while sum(each.state.nbytes for each in self._states.values()) > self._most:
                self._states.popitem(last=False)

    def clear(self) -> bool:
        """Free all states; returns whether there were any."""
        with self._lock:
            any_left = bool(self._states)
            self._states.clear()
            return any_left


def key_of(decoding: Decoding, size: int, state: DecodingState) -> Hashable | None:
    """What images must have in common to use the memory and the graphs of a state with `size` rows after each other;
    None if they cannot, since nothing is captured, or the model does not say."""
    models = getattr(state.model, "put_key", None)
    if models is None or state.over or state.step_shape is None:
        return None
    sampling, settings = state.sampling, ()
    if isinstance(state, LockstepState) or isinstance(sampling, LatentSampling):
        # The host reads them in steps.
        settings = tuple(getattr(sampling, item.name) for item in fields(sampling) if item.compare)
        settings += sampling.forced is None, sampling.allowed is None
    return decoding, size, models, state.shapes, settings
