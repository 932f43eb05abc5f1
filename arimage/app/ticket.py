"""A submitted request: its progress, its result, and the images it has so far."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from PIL import Image

from .plan import Plan
from .protocol import Cancelled, Progress, Request, Result, image_seeds


@dataclass
class Finished:
    """The finished images of a request, and what they cost."""

    images: list[Image.Image] = field(default_factory=list)
    image_passes: list[int] = field(default_factory=list)
    deciding: list[torch.LongTensor] = field(default_factory=list)
    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    exact: bool = True


class Ticket:
    """A submitted request.

    Attributes:
        request: what was asked for.
        future: resolves to the `Result`, or to the exception that `result` raises.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        drop: Callable[["Ticket"], None],
        on_progress: Callable[[Progress], None] | None,
    ):
        self.request, self.plan, self.future = request, plan, Future()
        # Only `settle` ends it from here on.
        self.future.set_running_or_notify_cancel()
        self.seeds = image_seeds(request.seed, request.count)
        self.finished, self.begun, self.shown = Finished(), 0, 0
        self.tokens, self._drop, self._on_progress = plan.tokens * request.count, drop, on_progress
        self._changed, self._latest = threading.Condition(), None

    def events(self, every: float | None = None) -> Iterator[Progress | Result]:
        """The progress of the request whenever it changes, then its `Result`. A slow reader misses some reports.

        Args:
            every: repeat the last report after this many seconds without a change, so that the reader can check whether it
                is still needed.

        Raises:
            Refused, Cancelled: as `result`.
        """
        progress: Progress | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self.future.done(), every)
                latest, self._latest = self._latest, None
            if latest is None and self.future.done():
                break
            if latest is not None:
                progress = latest
            elif progress is not None:
                progress = replace(progress, previews=None)
            else:
                # Another reader took the first report.
                continue
            yield progress
        yield self.result()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the images.

        Raises:
            Refused: if the pipeline raised a ValueError.
            Cancelled: after `cancel`, or if the engine was closed.
            TimeoutError: after `timeout` seconds.
        """
        return self.future.result(timeout)

    def cancel(self) -> None:
        """End the request at once. A batch stops when all its requests are cancelled."""
        self.settle(Cancelled("the request was cancelled"))
        self._drop(self)

    def settle(self, outcome: Result | Exception) -> None:
        """End the request, unless it has ended already."""
        with self._changed:
            if not self.future.done():
                if isinstance(outcome, Exception):
                    self.future.set_exception(outcome)
                else:
                    self.future.set_result(outcome)
            self._changed.notify_all()

    def report(
        self, passes: int, decided: int, previews: list[Image.Image] | None = None, queue_position: int = 0
    ) -> None:
        """Report progress."""
        progress = Progress(passes, decided, self.tokens, previews, queue_position)
        if self._on_progress is not None and not self.future.done():
            self._on_progress(progress)
        with self._changed:
            if previews is None and self._latest is not None:
                progress = replace(progress, previews=self._latest.previews)
            self._latest = progress
            self._changed.notify_all()
