"""More images than a batch has rows: an image that is finished makes room for one that waits."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .distribution import Sampling
from .interface import Decoding, ScaleModel, TokenModel
from .loop import INTERVAL
from .state import DecodingState


@dataclass
class Images:
    """Images that may begin.

    Attributes:
        names: what the caller calls each of the M images.
        model: a model that is bound to them.
        sampling, seeds: how to sample them, and their seeds, int64 [M].
    """

    names: Sequence[Hashable]
    model: TokenModel | ScaleModel
    sampling: Sampling
    seeds: torch.LongTensor


class Slots:
    """The rows of a batch in which images of one network, layout, guidance and decoding are generated, each from its own start
    to its own end.

    On an accelerator there are always `size` rows, so that shapes never change. On the CPU, where an idle row costs as much as
    any other, there are as many as images.

    Attributes:
        names: the image in each row, None in an idle one.
        state: what is decided; None before the first image.
        forward_passes: those of the model so far: the prefill of images that begin together is one, and so is a step.
    """

    def __init__(self, decoding: Decoding, size: int):
        self.decoding, self.size = decoding, size
        self.names: list[Any] = []
        self.state: Any = None
        self.forward_passes = 0

    @property
    def running(self) -> list[int]:
        """The rows that are not idle."""
        return [row for row, name in enumerate(self.names) if name is not None]

    @property
    def room(self) -> int:
        """How many images may begin now. Those of next-scale decodings all begin together."""
        running = len(self.running)
        return 0 if running and not self.state.refillable else self.size - running

    def begin(self, images: Images) -> None:
        """Prefill `images`, at most `room`, and let them have rows.

        Raises:
            ValueError: if the decoding cannot run on their model.
        """
        reason = self.decoding.supports(images.model)
        if reason is not None:
            raise ValueError(f"{type(self.decoding).__name__} cannot decode this model: {reason}")
        running = self.running
        decoding = self.state.starter(self.decoding) if running else self.decoding
        state = decoding.start(images.model, images.sampling, images.seeds)
        self.forward_passes += 1
        if not running:
            self.state, self.names = state, list(images.names)
            self._resize(self.size if self._fixed else len(self.names))
            return
        self._resize(max(len(self.names), len(running) + len(images.names)))
        rows = [row for row, name in enumerate(self.names) if name is None][: len(images.names)]
        self.state.put(torch.tensor(rows, device=images.seeds.device), state)
        for row, name in zip(rows, images.names, strict=True):
            self.names[row] = name

    def step(self) -> None:
        """One forward pass of the running images."""
        if not self._fixed and self.state.refillable:
            self._resize(len(self.running))
        self.decoding.step(self.state)
        self.forward_passes += 1

    def finished(self) -> list[int]:
        """The running rows whose images are finished. Reads the device."""
        finished = self.state.finished.tolist()
        return [row for row in self.running if finished[row]]

    def release(self, rows: list[int]) -> None:
        """Make rows idle, whatever their images have so far."""
        for row in rows:
            self.names[row] = None

    @property
    def _fixed(self) -> bool:
        return self.state.finished.device.type != "cpu"

    def _resize(self, count: int) -> None:
        """Have `count` rows, at least those that run."""
        if count == len(self.names):
            return
        running = self.running
        self.state.select(
            torch.tensor(running + running[:1] * (count - len(running)), device=self.state.finished.device)
        )
        self.names = [self.names[row] for row in running] + [None] * (count - len(running))


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
        ValueError: if the decoding cannot run on a model, or the logits of an image were not finite.
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
        on_cpu = slots.state.finished.device.type == "cpu"
        if on_cpu or slots.forward_passes % INTERVAL == 0:
            rows = slots.finished()
            if rows:
                on_finished(rows)
                slots.release(rows)
        if slots.forward_passes % INTERVAL == 0:
            slots.state.adapt()
