"""A submitted request: its progress, its result, and its finished images so far."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from PIL import Image

from ...decoding import decoding_to_text
from ...media.film import Film
from ...media.metadata import KEY
from ...pipelines.text.known import Unknown
from .types import SAMPLING, Cancelled, Progress, Request, Result, seeds_of
from .validation import Plan


@dataclass
class Finished:
    """The finished images of a request by their indices, and the cost so far: `passes` are the forward passes of the
    request until the last image was decided, `seconds` the time until the last one was decoded to pixels, and `lanes`
    the most that its batch had meanwhile."""

    images: dict[int, Image.Image] = field(default_factory=dict)
    image_passes: dict[int, int] = field(default_factory=dict)
    deciding: dict[int, torch.LongTensor] = field(default_factory=dict)
    passes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    lanes: int = 1
    film: Film | None = None


class Ticket:
    """A submitted request.

    Args:
        notes: called with the request and its images, returns their metadata; None for images without.

    Attributes:
        request: the request.
        future: resolves to the `Result`, or to the exception that `result` raises.
        kind: images of requests with equal kinds may share a batch: model, decoding, and so on.
        unbegun: the indices of the images that have not begun.
        calls_per_pass: the number of calls of denoising heads in each forward pass of its images so far.
        turn: its place in the queue; see `Engine`.
        unknown: the message about a prompt that the model does not know.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        kind: tuple,
        drop: Callable[["Ticket"], None],
        on_progress: Callable[[Progress], None] | None,
        notes: Callable[["Ticket", list[Image.Image]], list[str]] | None,
    ):
        self.request, self.plan, self.kind, self.future = request, plan, kind, Future()
        # From here on, only `settle` ends it.
        self.future.set_running_or_notify_cancel()
        self.seeds = seeds_of(request.seed, request.count)
        self.finished, self.shown = Finished(), 0
        self.calls_per_pass: list[int] = []
        self.turn = 0
        self.unknown: Unknown | None = None
        self.unbegun, self._started, self._submitted = deque(range(request.count)), None, time.perf_counter()
        self.tokens, self._drop, self._on_progress = plan.tokens * request.count, drop, on_progress
        self._changed, self._latest, self._notes = threading.Condition(), None, notes

    def events(self, every: float | None = None) -> Iterator[Progress | Result]:
        """Yield the progress of the request whenever it changes, then its `Result`. A slow reader misses some reports.

        Args:
            every: repeat the last report after this many seconds without a change, so that the reader can check
                whether it is still needed.

        Raises:
            Refused, Cancelled: as `result`.
        """
        progress = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._latest is not None or self.future.done(), every)
                latest, self._latest = self._latest, None
            if latest is None and self.future.done():
                yield self.result()
                return
            # The first report is that of `Engine.submit`.
            progress = latest or replace(progress, previews=None)  # pyright: ignore[reportArgumentType]
            yield progress

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the images.

        Raises:
            Refused: if the pipeline raised a ValueError.
            Cancelled: after `cancel`, or if the engine was closed.
            TimeoutError: after `timeout` seconds.
        """
        return self.future.result(timeout)

    def cancel(self) -> None:
        """End the request at once. The rows of its images are freed after the current forward pass."""
        self.settle(Cancelled("the request was cancelled"))
        self._drop(self)

    @property
    def decoding(self) -> str:
        """The name and settings of its decoding."""
        return self.request.decoding or decoding_to_text(self.plan.decoding)

    @property
    def inputs(self) -> list[str]:
        """The options of `arimage generate` that take its images."""
        return ["image", "mask_image"] if self.plan.edits else ["image"] if self.plan.reads else []

    @property
    def begun(self) -> bool:
        """Whether any of its images has begun."""
        return self._started is not None

    @property
    def waited(self) -> float:
        """The seconds since it was submitted."""
        return time.perf_counter() - self._submitted

    def start(self) -> None:
        """Called when images of the request begin."""
        self._started = self._started or time.perf_counter()

    @property
    def passes(self) -> int:
        """The number of forward passes of its images so far."""
        return len(self.calls_per_pass)

    def forget_idle_passes(self) -> None:
        """While no image is running, subtract the forward passes after the one that decided the last finished
        image."""
        del self.calls_per_pass[self.finished.passes :]

    @property
    def seconds(self) -> float:
        """The seconds since the first of its images began."""
        return time.perf_counter() - (self._started or 0)

    def decide(
        self, index: int, passes: int, ended: int, tokens: int, deciding: torch.LongTensor | None, film: Film | None
    ) -> None:
        """Add the cost of an image whose tokens are decided. It took `passes` forward passes, the last of them forward
        pass `ended` of the request."""
        finished = self.finished
        finished.image_passes[index], finished.film = passes, film or finished.film
        if deciding is not None:
            finished.deciding[index] = deciding
        finished.passes, finished.tokens = max(finished.passes, ended), finished.tokens + tokens

    def finish(self, index: int, image: Image.Image, seconds: float) -> None:
        """Add an image that is decoded to pixels after `seconds`; the last one ends the request."""
        self.finished.images[index], self.finished.seconds = image, seconds
        if len(self.finished.images) == self.request.count:
            self.settle(self._result())

    def again(self) -> None:
        """Restart the images that are not finished, without any other request in their batch."""
        self.kind = (*self.kind, self)
        self.unbegun = deque(index for index in range(self.request.count) if index not in self.finished.image_passes)

    def _result(self) -> Result:
        request, plan, finished, indices = self.request, self.plan, self.finished, range(self.request.count)
        tokens = finished.tokens / request.count
        condition = {"prompt": request.prompt} if request.class_label is None else {"class_label": request.class_label}
        optional = {
            name: getattr(plan, name) for name in ("negative_prompt", "order") if getattr(plan, name) is not None
        }
        deciding = torch.stack([finished.deciding[i] for i in indices]).numpy() if finished.deciding else None
        images = [finished.images[i] for i in indices]
        settings = {
            "model": request.model,
            **condition,
            **optional,
            "count": request.count,
            "seed": request.seed,
            "decoding": self.decoding,
            **{name: getattr(plan.sampling, name) for name in SAMPLING},
            **dict(plan.decoder),
            "height": plan.size[0],
            "width": plan.size[1],
            **({"made_from": self.inputs} if self.inputs else {}),
        }
        if self._notes is not None:
            for image, note in zip(images, self._notes(self, images), strict=True):
                image.info[KEY] = note
        return Result(
            images=images,
            seeds=self.seeds,
            passes=finished.passes,
            head_calls=sum(self.calls_per_pass[: finished.passes]),
            tokens_per_pass=sum(tokens / passes for passes in finished.image_passes.values()) / request.count,
            seconds=finished.seconds,
            exact=plan.decoding.exact,
            decoding=self.decoding,
            deciding_pass=deciding,
            settings=settings,
            film=finished.film,
            unknown=self.unknown,
        )

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
