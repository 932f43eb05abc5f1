"""A window that adapts to the machine and the image: the size that decides the most tokens per second."""

import math
import statistics
import time
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch

from .interface import TokenModel
from .watch import INTERVAL


SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# Accepted drafts per step and doubling of the window, before anything was seen.
GUESS = 0.8
# The cost of trying, as a share of the time of autoregressive decoding.
LOSS = 0.05

_seconds: WeakKeyDictionary[object, dict] = WeakKeyDictionary()


class AdaptiveWindow:
    """Picks the window that decides the most tokens per second, for all images of a call together.

    Each size is credited with accepted drafts per doubling of the window; what is seen of the size in use corrects its own
    credit by a half, those of the others by a quarter. A window is only tried if accepting none of its drafts until the next
    choice would not put the slowest image behind autoregressive decoding by more than `LOSS` of its time.

    Args:
        seconds: the time of a step at each size.
        num_tokens: the tokens of an image.
        device: where the images are decoded; what is seen of them is summed up there.
    """

    def __init__(self, seconds: dict[int, float], num_tokens: int, device: torch.device | str = "cpu"):
        self.seconds, self.num_tokens = seconds, num_tokens
        self._credit = dict.fromkeys(seconds, GUESS)
        self._spent = 0.0
        self.window = self._best(1)
        # Accepted drafts per image and step, and steps, since the last choice.
        self._seen = torch.zeros(2, device=device)

    @property
    def largest(self) -> int:
        """The largest window that may be chosen."""
        return max(self.seconds)

    def _best(self, decided: int) -> int:
        alone = self.seconds[1]
        spare = (decided - 1 + LOSS * self.num_tokens) * alone - self._spent
        affordable = [size for size, cost in self.seconds.items() if size == 1 or INTERVAL * (cost - alone) <= spare]
        return max(affordable, key=lambda s: (1 + self._credit[s] * math.log2(s)) / self.seconds[s])

    def observe(self, leading: torch.LongTensor, running: torch.BoolTensor) -> None:
        """Take in a step that accepted `leading` [B] drafts, of the images that are still `running` [B]."""
        self._seen[0] += (leading * running).sum() / running.sum().clamp(min=1)
        self._seen[1] += 1

    def restart(self) -> None:
        """Forget the time spent: other images begin."""
        self._spent = 0.0

    def choose(self, decided: torch.LongTensor) -> int:
        """The size for the next steps, where `decided` [B] tokens of each image are decided. Reads the device."""
        accepted, steps = self._seen.tolist()
        self._seen.zero_()
        self._spent += steps * self.seconds[self.window]
        if self.window > 1 and steps:
            seen = accepted / steps / math.log2(self.window)
            for size, credit in self._credit.items():
                self._credit[size] += (seen - credit) * (0.5 if size == self.window else 0.25)
        self.window = self._best(int(decided.min()))
        return self.window


def step_seconds(model: TokenModel, batch_size: int, run: Callable[[int], Callable[[], None]]) -> dict[int, float]:
    """Seconds of a step at each of `SIZES` that the image has room for, measured once per network and batch size.

    `run(size)` returns a function that makes one step.
    """
    known = _seconds.setdefault(model.network, {})
    key = batch_size, model.num_tokens
    if key not in known:
        known[key] = {size: _time(run(size), model.device) for size in SIZES if size <= max(model.num_tokens - 1, 1)}
    return known[key]


def _time(make_step: Callable[[], None], device: torch.device, repeats: int = 5) -> float:
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    make_step()
    seconds = []
    for _ in range(repeats):
        began = now()
        make_step()
        seconds.append(now() - began)
    return statistics.median(seconds)
