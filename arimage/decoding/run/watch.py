"""Tracks on the host which images are finished."""

import torch


# The number of steps between two reads that make the host wait for an accelerator.
INTERVAL = 8
# How many steps the host is ahead of a CUDA device, so that the device always has work. It takes as many steps in vain
# at the end.
AHEAD = 2


class Watch:
    """Tracks which images are finished.

    Reading a tensor waits for everything launched before. On a CUDA device the flags are therefore copied to the host
    after every step, and the host reads the copy made `AHEAD` steps earlier. It waits for that copy, so it is never
    further ahead.

    Args:
        finished: bool [B], which steps write in place.
    """

    def __init__(self, finished: torch.BoolTensor):
        self._finished, self._looks = finished, 0
        if finished.is_cuda:
            self._copies = torch.zeros(AHEAD, len(finished), dtype=torch.bool, device="cpu", pin_memory=True)
            self._events = [torch.cuda.Event() for _ in range(AHEAD)]

    def restart(self) -> None:
        """Forget the copies, since other images begin."""
        self._looks = 0

    def look(self) -> torch.BoolTensor:
        """Bool [B] on the CPU, called once after every step: images known to be finished."""
        self._looks += 1
        if self._finished.is_cuda:
            return self._exchange(self._looks % AHEAD)
        if self._finished.device.type == "cpu" or self._looks % INTERVAL == 0:
            return self._finished.cpu()
        return torch.zeros(len(self._finished), dtype=torch.bool)

    def _exchange(self, turn: int) -> torch.BoolTensor:
        """Read a copy of the flags, and start a new copy in its place."""
        self._events[turn].synchronize()
        seen = self._copies[turn].clone() if self._looks > AHEAD else torch.zeros_like(self._copies[turn])
        self._copies[turn].copy_(self._finished, non_blocking=True)
        self._events[turn].record(torch.cuda.current_stream(self._finished.device))
        return seen
