"""A window that adapts to the machine and the images: the size that decides the most tokens per second."""

import math

import torch

from .watch import INTERVAL


# A window of W drafts is expected to decide W ** exponent tokens per step. Before anything was seen the exponent is
# this.
GUESS = 0.5
# The cost of trying, as a share of the time of autoregressive decoding.
LOSS = 0.03
# A new size is tried for so many intervals. Only the last one counts, since the first drafts of a size are hardly
# refined yet.
TRIAL = 2


class AdaptiveWindow:
    """Picks the window that decides the most tokens per second, for all images of a call together.

    Each size has an exponent, see `GUESS`. What is seen of the size in use corrects its own exponent by a half, those
    of the others by a quarter. A window is only tried if accepting none of its drafts until the next choice (`TRIAL`)
    would not put the slowest image behind autoregressive decoding by more than `LOSS` of its time.

    Args:
        seconds: the time of a step at each size, see `step_seconds`.
        num_tokens: the tokens of an image.
        device: where the images are decoded; what is seen of them is summed up there.
    """

    def __init__(self, seconds: dict[int, float], num_tokens: int, device: torch.device | str = "cpu"):
        self.seconds, self.num_tokens = seconds, num_tokens
        self._exponents = dict.fromkeys(seconds, GUESS)
        self._spent = 0.0
        self.window = self._best(1)
        # Intervals for which the size in use was tried.
        self._tried = 0
        # Accepted drafts per image and step, and steps, since the last choice.
        self._seen = torch.zeros(2, device=device)

    @property
    def largest(self) -> int:
        """The largest window that may be chosen."""
        return max(self.seconds)

    def _best(self, decided: int) -> int:
        alone = self.seconds[1]
        spare = (decided - 1 + LOSS * self.num_tokens) * alone - self._spent
        affordable = [
            size for size, cost in self.seconds.items() if size == 1 or TRIAL * INTERVAL * (cost - alone) <= spare
        ]
        return max(affordable, key=lambda size: size ** self._exponents[size] / self.seconds[size])

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
