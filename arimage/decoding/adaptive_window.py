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
# The drafts a pass keeps for every doubling of the window, before anything was seen.
GUESS = 0.8
# What trying may cost, as a share of the time that autoregressive decoding takes.
LOSS = 0.05

_seconds: WeakKeyDictionary[object, dict] = WeakKeyDictionary()


class AdaptiveWindow:
    """Picks the window that decides the most codes a second, for all images of a call together.

    Each size is credited with so many drafts kept for every doubling that it takes; what is seen of the size in use corrects
    its own number by a half, those of the others by a quarter. A window is only tried if keeping none of its drafts until
    the next choice would not put the slowest image behind autoregressive decoding by more than `LOSS` of its time.

    Args:
        seconds: what a pass takes at each size.
        num_tokens: the codes of an image.
    """

    def __init__(self, seconds: dict[int, float], num_tokens: int):
        self.seconds, self.num_tokens = seconds, num_tokens
        self._kept_a_doubling = dict.fromkeys(seconds, GUESS)
        self._spent = 0.0
        self.window = self._best(1)
        self._passes, self._kept = 0, 0

    def _best(self, decided: int) -> int:
        alone = self.seconds[1]
        spare = (decided - 1 + LOSS * self.num_tokens) * alone - self._spent
        affordable = [size for size, cost in self.seconds.items() if size == 1 or INTERVAL * (cost - alone) <= spare]
        return max(affordable, key=lambda s: (1 + self._kept_a_doubling[s] * math.log2(s)) / self.seconds[s])

    def observe(self, leading: torch.LongTensor, running: torch.BoolTensor) -> None:
        """Take in a pass that kept `leading` [B] drafts, of the images that are still `running` [B]."""
        self._kept = self._kept + (leading * running).sum() / running.sum().clamp(min=1)
        self._passes += 1

    def choose(self, decided: torch.LongTensor) -> int:
        """The size for the next passes, where `decided` [B] codes of each image are decided."""
        self._spent += self._passes * self.seconds[self.window]
        if self.window > 1:
            seen = float(self._kept) / self._passes / math.log2(self.window)
            for size, credit in self._kept_a_doubling.items():
                self._kept_a_doubling[size] += (seen - credit) * (0.5 if size == self.window else 0.25)
        self.window = self._best(int(decided.min()))
        self._passes, self._kept = 0, 0
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


def _time(make_pass: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
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
