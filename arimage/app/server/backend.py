"""What generates the images of the server: an engine in its own process, or something with the same abilities."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from prometheus_client import Metric
from starlette.concurrency import run_in_threadpool

from ..engine.engine import Engine
from ..engine.models import ModelInfo
from ..engine.ticket import Ticket
from ..engine.types import Limits, Progress, Request
from .metrics import EngineMetrics


class Submitted(Protocol):
    """A request that was accepted, as `Ticket`.

    Attributes:
        future: resolves to the `Result`, or to the exception that ended the request.
        tokens: the number of tokens of all its images.
    """

    future: Future
    tokens: int

    def cancel(self) -> None:
        """End the request, unless it has ended already."""
        ...


class Backend(Protocol):
    """Generates the images of requests; see `Engine`. The server drains by itself: it submits nothing more and waits.

    Attributes:
        limits: which requests are accepted.
    """

    limits: Limits

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The abilities of each model, by name; those of adapters are MODEL:NAME."""
        ...

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        ...

    async def submit(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> Submitted:
        """Queue a request, whose images have been reduced to what the model needs. Requests of different
        `Request.client` take turns. `on_progress` is called from any thread. Cancelling the submission ends the
        request.

        Raises:
            Refused, Cancelled, Unavailable: if it is not accepted.
        """
        ...

    async def collect(self) -> list[Metric]:
        """The metrics of the engine or the engines."""
        ...


class EngineBackend:
    """An engine in this process."""

    def __init__(self, engine: Engine):
        self.limits = engine.limits
        self._engine, self._metrics = engine, EngineMetrics(engine)

    @property
    def models(self) -> dict[str, ModelInfo]:
        return self._engine.models

    @property
    def alive(self) -> bool:
        return self._engine.alive

    async def submit(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> Ticket:
        submitting = asyncio.ensure_future(run_in_threadpool(self._engine.submit, request, on_progress))
        try:
            return await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # Its thread goes on, and queues the request.
            submitting.add_done_callback(lambda task: task.exception() or task.result().cancel())
            raise

    async def collect(self) -> list[Metric]:
        return self._metrics.collect()
