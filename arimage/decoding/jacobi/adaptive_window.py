"""A window that adapts to the machine and the images: the size that decides the most tokens per second."""

import math

import torch

from ..run.batch import INTERVAL


# A window of W drafts is expected to decide W ** exponent tokens per step. This is the first estimate of the exponent.
GUESS = 0.5
# The cost of trying, as a share of the time of autoregressive decoding.
LOSS = 0.03
# How many intervals a new size is tried for. Only the last one counts, since the first drafts are hardly refined.
TRIAL = 2


class AdaptiveWindow:
    """Picks the window that decides the most tokens per second, for all images of a call together.

    Each size has an exponent, see `GUESS`. An observation moves the exponent of the size in use halfway to the
    observed value, and all other exponents a quarter of the way. A window is only tried if, even with no draft
    accepted until the next choice (`TRIAL`), the slowest image would not take longer than autoregressive decoding by
    more than a share `LOSS` of its time.

    Args:
        seconds: the duration of a step at each size, see `step_seconds`.
        num_tokens: the number of tokens of an image.
        device: where the images are decoded, and the observations summed up.
    """

    def __init__(self, seconds: dict[int, float], num_tokens: int, device: torch.device | str = "cpu"):
        self.num_tokens = num_tokens
        # Accepted drafts per image and step, and steps, since the last choice.
        self._seen = torch.zeros(2, device=device, dtype=torch.float32)
        self.begin(seconds)

    def begin(self, seconds: dict[int, float]) -> None:
        """Forget what was observed, and choose among the sizes of `seconds` from now on."""
        self.seconds = seconds
        self._exponents = dict.fromkeys(seconds, GUESS)
        self._spent = 0.0
        self.window = self._best(1)
        # The number of intervals for which the current size has been tried.
        self._tried = 0
        self._seen.zero_()

    def _best(self, decided: int) -> int:
        alone = self.seconds[1]
        spare = (decided - 1 + LOSS * self.num_tokens) * alone - self._spent
        affordable = [
            size for size, cost in self.seconds.items() if size == 1 or TRIAL * INTERVAL * (cost - alone) <= spare
        ]
        return max(affordable, key=lambda size: size ** self._exponents[size] / self.seconds[size])

    def observe(self, leading: torch.LongTensor, running: torch.BoolTensor) -> None:
        """Record a step that accepted `leading` [B] drafts; only images that are still `running` [B] count."""
        self._seen[0] += (leading * running).sum() / running.sum().clamp(min=1)
        self._seen[1] += 1

    def restart(self) -> None:
        """Reset the time spent, since other images begin."""
        self._spent = 0.0

    def choose(self, decided: torch.LongTensor) -> int:
        """The size for the next steps, where `decided` [B] tokens of each image are decided. Reads the device."""
        accepted, steps = self._seen.tolist()
        self._seen.zero_()
        self._spent += steps * self.seconds[self.window]
        self._tried += 1
        if self._tried < TRIAL:
            return self.window
        if self.window > 1 and steps:
            seen = math.log(1 + accepted / steps, self.window)
            for size, exponent in self._exponents.items():
                self._exponents[size] += (seen - exponent) * (0.5 if size == self.window else 0.25)
        previous, self.window = self.window, self._best(int(decided.min()))
        if self.window != previous:
            self._tried = 0
        return self.window
