"""More images than a batch has rows: an image that is finished makes room for one that waits."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..contract.distribution import Sampling
from ..contract.models import Decoding, Model
from ..contract.state import DecodingState
from .watch import INTERVAL, Watch


@dataclass
class Images:
    """Images that may begin.

    Attributes:
        names: what the caller calls each of the M images.
        model: a model that is bound to them, and to no others: it is bound to those that take their rows.
        sampling, seeds: how to sample them, and their seeds, int64 [M].
    """

    names: Sequence[Hashable]
    model: Model
    sampling: Sampling
    seeds: torch.LongTensor


class Slots:
    """The rows of a batch, in which images of one network, layout, guidance and decoding are generated, each from its own start
    to its own end.

    On an accelerator, and with compiled steps, there are always `size` rows, so that shapes never change. On the CPU, where an
    idle row costs as much as any other, there are as many as images.

    Args:
        size: how many images may run.
        compiled: as in `decode`.

    Attributes:
        names: the image in each row, None in an idle one.
        state: what is decided; None before the first image.
        begins, steps: the forward passes so far: prefills, one for images that begin together, and steps.
        head_calls: calls of denoising heads so far, one after the other.
    """

    def __init__(
        self,
        decoding: Decoding,
        size: int,
        compiled: Callable[[Decoding, DecodingState], Callable[[DecodingState], None]] | None = None,
    ):
        self.decoding, self.size = decoding, size
        self.names: list[Any] = []
        self.state: Any = None
        self.begins = self.steps = self.head_calls = 0
        self._compiled = compiled
        # The step before which the image of each row began.
        self._began: list[int] = []

    @property
    def running(self) -> list[int]:
        """The rows that are not idle."""
        return [row for row, name in enumerate(self.names) if name is not None]

    @property
    def room(self) -> int:
        """How many images may begin now. Those of next-scale decodings all begin together."""
        running = len(self.running)
        return 0 if running and not self.state.refillable else self.size - running

    @property
    def forward_passes(self) -> int:
        return self.begins + self.steps

    def begin(self, images: Images) -> None:
        """Prefill `images`, at most `room`, and let them have rows.

        Raises:
            ValueError: if the decoding cannot run on their model.
        """
        reason = self.decoding.supports(images.model)
        if reason is not None:
            raise ValueError(f"{type(self.decoding).__name__} cannot decode this model: {reason}")
        running, count = len(self.running), len(images.names)
        decoding = self.state.starter(self.decoding) if running else self.decoding
        state = decoding.start(images.model, images.sampling, images.seeds)
        self.begins += 1
        self.head_calls += state.head_calls
        if running:
            self._resize(max(len(self.names), running + count))
            rows = [row for row, name in enumerate(self.names) if name is None][:count]
            moved = self.state.put(torch.tensor(rows, device=images.seeds.device), state)
        else:
            moved = True
            self.state, self.names, self._began = state, [None] * count, [0] * count
            rows = range(count)
        for row, name in zip(rows, images.names, strict=True):
            self.names[row], self._began[row] = name, self.steps
        if self._fixed and self.state.refillable:
            self._resize(self.size)
        # What was seen of these rows is that of others.
        self._watch = Watch(self.state.finished)
        if moved:
            self._take_step = (self._compiled or _step_of)(self.decoding, self.state)
        self._limit_attention()

    def step(self) -> None:
        """One forward pass of the running images."""
        if not self._fixed and self.state.refillable:
            self._resize(len(self.running))
        before = self.state.head_calls
        self._take_step(self.state)
        self.head_calls += self.state.head_calls - before
        self.steps += 1
        if self.steps % INTERVAL == 0:
            self.state.adapt()
        self._limit_attention()

    def finished(self) -> list[int]:
        """The running rows whose images are known to be finished. Called once after every forward pass."""
        finished = self._watch.look().tolist()
        return [row for row in self.running if finished[row]]

    def passes_of(self, rows: list[int]) -> list[int]:
        """How many forward passes the images in `rows` took. Reads the device."""
        passes = self.state.steps.tolist()
        return [passes[row] for row in rows]

    def idle_steps(self, rows: list[int]) -> int:
        """How many steps were taken since the last of the images in `rows`, which are finished, was decided. Reads the device."""
        ends = [self._began[row] + passes - 1 for row, passes in zip(rows, self.passes_of(rows), strict=True)]
        return self.steps - max(ends)

    def release(self, rows: list[int]) -> None:
        """Make rows idle, whatever their images have so far."""
        for row in rows:
            self.names[row] = None

    @property
    def _fixed(self) -> bool:
        return self._compiled is not None or self.state.finished.device.type != "cpu"

    def _resize(self, count: int) -> None:
        """Have `count` rows, at least those that run."""
        if count == len(self.names):
            return
        running = self.running
        idle = count - len(running)
        self.state.select(torch.tensor(running + running[:1] * idle, device=self.state.finished.device))
        self.names = [self.names[row] for row in running] + [None] * idle
        self._began = [self._began[row] for row in running] + [0] * idle
        self._watch = Watch(self.state.finished)

    def _limit_attention(self) -> None:
        # Compiled steps would be compiled for every limit.
        if self._compiled is not None:
            return
        patience = 1 if self.state.finished.device.type == "cpu" else INTERVAL
        if self.steps % patience == 0:
            self.state.limit_attention(patience)


def _step_of(decoding: Decoding, state: DecodingState) -> Callable[[DecodingState], None]:
    return decoding.step


def decode_slots(
    slots: Slots,
    waiting: Callable[[int], Images | None],
    on_finished: Callable[[list[int]], None],
    on_step: Callable[[], bool],
) -> None:
    """Run until no image is left, or until `on_step` returns True.

    Args:
        waiting: given how many images may begin, returns those that do, or None if none waits.
        on_finished: called with the rows of images that are finished, before other images get them.
        on_step: called after every forward pass.

    Raises:
        ValueError: if the decoding cannot run on a model.
    """
    while True:
        images = waiting(slots.room) if slots.room else None
        if images is not None:
            slots.begin(images)
        elif slots.running:
            slots.step()
        else:
            return
        if on_step():
            return
        rows = slots.finished()
        if rows:
            on_finished(rows)
            slots.release(rows)
