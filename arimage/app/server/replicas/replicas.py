"""Several engines behind one server: it sends requests to replicas of Ray Serve, each in its own process, on this
machine or on a cluster.

The server itself stays in the process of the command and speaks HTTP as it does with one engine. So the URLs of
images, the errors, the streams, the token and the limits on connections do not depend on the replica, and Serve's own
HTTP proxy is not used.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from ...engine.models import ModelInfo
from ...engine.types import Cancelled, Limits, Progress, Refused, Request, Result, Unavailable
from ...engine.videos import VideoProgress, VideoRequest
from ..metrics import merge
from .places import Places


logger = logging.getLogger(__name__)

# How many replicas may end with a request before it is given up: it may be the reason.
ATTEMPTS = 3
# How long the replicas may take to send their metrics, in seconds; Prometheus waits for 10 by default.
METRICS_SECONDS = 9


class RemoteVideos:
    """Generates videos by replicas, one at a time by each; see `VideoMaker`.

    Args:
        handle: as that of `Replicas`.
        models: the abilities of their models.
        limits: those of the server.
        at_a_time: how many replicas there are at most.
    """

    def __init__(self, handle: Any, models: dict[str, ModelInfo], limits: Limits, at_a_time: int):
        self.models, self.limits, self.at_a_time, self._handle = models, limits, at_a_time, handle

    def check(self, request: VideoRequest) -> None:
        """Refuse a request that the model does not support or the limits do not allow.

        Raises:
            Refused: with the reason.
            Unavailable: if there are no replicas.
        """
        for error in self._answers("check_video", request):
            if error is not None:
                raise error

    def run(self, request: VideoRequest) -> Generator[VideoProgress, None, None]:
        """Yield the progress of a video, whose frames come with the last one. If a replica ends, another one begins
        again. Closing the iterator stops the generation.

        Raises:
            Refused: if a replica refuses it.
            Unavailable: if there are no replicas, or `ATTEMPTS` of them have ended with this video.
        """
        for answer in self._answers("generate_video", request):
            if isinstance(answer, Refused):
                raise answer
            yield answer

    def _answers(self, method: str, request: VideoRequest) -> Iterator[Any]:
        for attempt in range(1, ATTEMPTS + 1):
            answers = getattr(self._handle, method).remote(request)
            try:
                with _in_our_terms():
                    yield from answers
                return
            except _ReplicaEnded as error:
                logger.warning("a replica has ended: another one generates its video (%s)", error)
                if attempt == ATTEMPTS:
                    message = f"{ATTEMPTS} processes that were to generate the video have ended: try again later"
                    raise Unavailable(message) from error
            finally:
                answers.cancel()


class RemoteTicket:
    """A request to replicas; see `Submitted`.

    Attributes:
        answers: those of the replica that has it, or for which it waits.
        cancelled: whether it is to be generated no more.
    """

    def __init__(self):
        self.tokens, self.future = 0, Future()
        self.answers: Any = None
        self.cancelled = False

    def cancel(self) -> None:
        """End the request, unless it has ended already."""
        if not self.future.done():
            self.cancelled = True
            if self.answers is not None:
                self.answers.cancel()


class Replicas:
    """Replicas as the `Backend` of a server.

    Args:
        handle: Serve's handle of a running deployment of `Replica`, with `stream=True`.
        models: the abilities of their models.
        limits: those of the server; up to `queue` requests wait in this process for a replica with room.
        running: how many requests all replicas have at most.
        videos: generates videos by the same replicas.

    Attributes:
        limits: those of the server; `queue` includes the requests that replicas have.
        on_failure, failure: as those of `Engine`. Serve starts replicas again; Ray itself is not.
    """

    def __init__(
        self,
        handle: Any,
        models: dict[str, ModelInfo],
        limits: Limits,
        running: int,
        videos: RemoteVideos | None = None,
    ):
        self.models, self.limits, self.videos = models, replace(limits, queue=limits.queue + running), videos
        self.on_failure: Callable[[], None] | None = None
        self.failure: BaseException | None = None
        self._handle, self._queue, self._places = handle, limits.queue, Places(running)
        # The number of requests that have a place, and wait in Serve for a replica.
        self._unassigned = 0
        self._lock, self._closed = threading.Lock(), False
        # The requests that have not ended, and the tasks that read the answers to them.
        self._running: set[RemoteTicket] = set()
        self._tasks: set[asyncio.Task] = set()
        # The ids of the replicas that were reported as ended.
        self._ended: set[str | None] = set()

    @property
    def alive(self) -> bool:
        """Whether requests are accepted."""
        return not self._closed

    @property
    def _waiting(self) -> int:
        return self._unassigned + self._places.waiting

    async def submit(self, request: Request, on_progress: Callable[[Progress], None] | None = None) -> RemoteTicket:
        """Wait until a replica accepts a request. If that replica ends, another one generates it from the beginning.

        Raises:
            Refused: if a replica refuses it, or too many requests are waiting.
            Cancelled: if the server is closed.
            Unavailable: if there are no replicas, or `ATTEMPTS` of them have ended with this request.
        """
        with self._lock:
            if self._closed:
                raise Cancelled("the server is closed: start it again")
            if self._waiting >= self._queue and not self._places.make_room(request):
                raise Refused(f"{self._queue} requests are waiting already: try again later", busy=True)
            ticket = RemoteTicket()
            self._running.add(ticket)
        answers = self._answers(request, ticket)
        try:
            ticket.tokens = await anext(answers)
        except BaseException as error:
            self._running.discard(ticket)
            if isinstance(error, asyncio.CancelledError):
                ticket.cancel()
            raise
        task = asyncio.create_task(self._follow(ticket, answers, on_progress))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return ticket

    async def _follow(
        self, ticket: RemoteTicket, answers: AsyncIterator[Any], on_progress: Callable[[Progress], None] | None
    ) -> None:
        try:
            async for answer in answers:
                if isinstance(answer, Result):
                    ticket.future.set_result(answer)
                elif on_progress is not None:
                    on_progress(answer)
        # Raised where the result is awaited.
        except Exception as error:
            ticket.future.set_exception(error)
        finally:
            self._running.discard(ticket)

    async def _answers(self, request: Request, ticket: RemoteTicket) -> AsyncIterator[Any]:
        """What `Replica.generate` yields. If the replica ends, another one begins again; since an image depends on its
        seed alone, what it repeats is left out."""
        seen = 0
        async with self._places.place(request):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    number = 0
                    async for answer in self._ask(request, ticket):
                        number += 1
                        if number > seen or isinstance(answer, Result):
                            seen = number
                            yield answer
                    return
                except _ReplicaEnded as error:
                    if error.replica not in self._ended:
                        self._ended.add(error.replica)
                        logger.warning("a replica has ended: others generate its requests (%s)", error)
                    if attempt == ATTEMPTS:
                        message = f"{ATTEMPTS} processes that were to generate the image have ended: try again later"
                        raise Unavailable(message) from error

    async def _ask(self, request: Request, ticket: RemoteTicket) -> AsyncIterator[Any]:
        """The answers of one replica."""
        with self._lock:
            if self._closed or ticket.cancelled:
                raise Cancelled("the request was cancelled")
            ticket.answers = self._handle.generate.remote(request)
        self._unassigned += 1
        waits = True
        try:
            with _in_our_terms():
                async for answer in ticket.answers:
                    if waits:
                        self._unassigned, waits = self._unassigned - 1, False
                    if isinstance(answer, Cancelled):
                        # The engine has failed, and its process is about to end.
                        raise _ReplicaEnded(answer)
                    if isinstance(answer, Exception):
                        raise answer
                    yield answer
                    # If the replica ends now, nothing is lost.
                    if isinstance(answer, Result):
                        return
        finally:
            self._unassigned -= waits

    async def collect(self) -> list[Metric]:
        """The metrics of each replica with its name as the label `replica`, and how many answer and requests wait."""
        from ray.serve.exceptions import DeploymentUnavailableError

        answers = []
        try:
            broadcast = self._handle.broadcast("collect")
            answers = await broadcast.results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        except (TimeoutError, DeploymentUnavailableError):
            logger.warning("no replica has sent its metrics")
        # One that has just ended sends an error.
        by_replica = dict(answer for answer in answers if not isinstance(answer, Exception))
        running = GaugeMetricFamily("arimage_replicas", "Replicas that have sent their metrics.", len(by_replica))
        waiting = GaugeMetricFamily("arimage_unassigned_requests", "Requests that wait for a replica.", self._waiting)
        return [*merge(by_replica), running, waiting]

    def close(self) -> None:
        """Cancel all requests."""
        with self._lock:
            self._closed = True
            running = list(self._running)
        for ticket in running:
            ticket.cancel()
        self._places.cancel()

    def fail(self, error: Exception) -> None:
        """End the server because of an error that every later request would meet too. May be called in any thread."""
        if not self._closed:
            logger.critical("the server ends: %s", error)
            self.failure = error
            self.close()
            if self.on_failure is not None:
                self.on_failure()


class _ReplicaEnded(Exception):
    """The process of a replica, its machine, or what they had stored is gone.

    Attributes:
        replica: its id in Ray, if it is known.
    """

    def __init__(self, error: Exception):
        super().__init__(str(error).partition("\n")[0])
        self.replica: str | None = getattr(error, "actor_id", None)


@contextmanager
def _in_our_terms() -> Iterator[None]:
    """Translate the errors of Ray.

    Raises:
        Cancelled, Unavailable: what the server answers with.
        _ReplicaEnded: if another replica can generate the request.
    """
    from ray.exceptions import RayError, RayTaskError, TaskCancelledError
    from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

    try:
        yield
    except TaskCancelledError as error:
        raise Cancelled("the request was cancelled") from error
    # The code of the replica has raised it: another replica would too.
    except RayTaskError:
        raise
    except DeploymentUnavailableError as error:
        raise Unavailable("no process is left that could generate the image: try again later") from error
    except (RayError, ReplicaUnavailableError) as error:
        raise _ReplicaEnded(error) from error
