"""A window that follows the machine and the image: as long as a longer one decides more codes a second."""

import math
import statistics
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from .interface import TokenModel


SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# How often a window is chosen, in passes: choosing waits for the device.
INTERVAL = 8
# How often a draft is kept, before anything was seen.
GUESS = 0.8
# How many times the codes a pass a doubled window is given credit for, before it was tried.
GAIN = 1.3

_seconds: WeakKeyDictionary[object, dict] = WeakKeyDictionary()


class AdaptiveWindow:
    """Picks the window that decides the most codes a second, for all images of a call together.

    What a window decides is seen when it is used. One that was not used yet is given credit: a shorter one for the drafts
    that were kept within it, a longer one for `GAIN` times the codes at every doubling.

    Args:
        seconds: what a pass takes at each size.
    """

    def __init__(self, seconds: dict[int, float], device: torch.device):
        self.seconds, self.device = seconds, device
        self._codes = {}
        self._use(max(seconds, key=lambda size: sum(GUESS**o for o in range(size)) / seconds[size]))

    def _use(self, window: int) -> None:
        self.window, self._passes = window, 0
        self._reached = torch.zeros(window, device=self.device)

    def observe(self, leading: torch.LongTensor, running: torch.BoolTensor) -> None:
        """Take in a pass that kept `leading` [B] drafts, of the images that are still `running` [B]."""
        offsets = torch.arange(self.window, device=leading.device)
        reached = (leading[:, None] >= offsets) & running[:, None]
        self._reached += reached.sum(0) / running.sum().clamp(min=1)
        self._passes += 1

    def choose(self) -> int:
        """The size for the next passes."""
        reached = (self._reached / self._passes).tolist()
        seen = sum(reached)
        self._codes[self.window] = (self._codes.get(self.window, seen) + seen) / 2

        def codes(size: int) -> float:
            if size in self._codes:
                return self._codes[size]
            if size < self.window:
                return sum(reached[:size])
            shorter = max(used for used in self._codes if used < size)
            return self._codes[shorter] * GAIN ** math.log2(size / shorter)

        self._use(max(self.seconds, key=lambda size: codes(size) / self.seconds[size]))
        return self.window


def pass_seconds(model: TokenModel, batch_size: int, run: Callable[[int], Callable[[], None]]) -> dict[int, float]:
    """Seconds of a pass at each of `SIZES` that the image has room for, measured once for a network and batch size.

    `run(size)` gives a function that makes one pass.
    """
    known = _seconds.setdefault(model.network, {})
    key = batch_size, model.num_tokens
    if key not in known:
        known[key] = {size: _time(run(size), model.device) for size in SIZES if size <= max(model.num_tokens - 1, 1)}
    return known[key]


def _time(make_pass: Callable[[], None], device: torch.device, repeats: int = 3) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    make_pass()
    seconds = []
    for _ in range(repeats):
        began = now()
        make_pass()
        seconds.append(now() - began)
    return statistics.median(seconds)
