"""Several engines behind one server: replicas of Ray Serve, each in its own process, on this machine or on a cluster.

The server itself stays in the process of the command and speaks HTTP as it does with one engine; it hands requests to
replicas instead of to its own engine. So the urls of images, the errors, the streams, the token and the limits on
connections do not depend on the replica, and Serve's own HTTP proxy is not used.
"""

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from ...cli.options import Steps, parse_lora
from ...pipelines.saving.saved_folder import local_folder
from ..engine.adapters import split_adapters
from ..engine.models import ModelInfo, load_models
from ..engine.start import start_engines
from ..engine.types import Cancelled, Limits, Progress, Refused, Request, Result, Unavailable
from ..engine.videos import VideoProgress, VideoRequest
from .backend import EngineBackend
from .metrics import merge
from .places import Places


logger = logging.getLogger(__name__)

# Requests that a replica has at a time, per image of its batch: while as many wait as are generated, the batch stays
# full. The others wait in this process, where they do not end with a replica and go to the first one with room.
AHEAD = 2
# How many replicas may end with a request before it is given up: it may be the reason.
ATTEMPTS = 3
# How often Serve looks whether a replica is alive, in seconds. It replaces one that has ended.
HEALTH_SECONDS = 2
# How long a replica that is taken away may take to finish its images, in seconds.
FINISHING_SECONDS = 600
# How long the replicas may take to send their metrics, in seconds; Prometheus waits for 10 by default.
METRICS_SECONDS = 9


@dataclass(frozen=True)
class ReplicaSettings:
    """What every replica is started with.

    Attributes:
        models, dtype, lora, steps: as in `load_models`.
        device: "cpu", "cuda", or None for GPUs if there are any.
        limits: those of the server.
        videos: whether there may be models of videos.
    """

    models: list[str] | None
    device: str | None
    dtype: str
    lora: list[str] | None
    limits: Limits
    steps: Steps = "captured"
    videos: bool = False


class Replica:
    """An engine in a process of Ray Serve."""

    def __init__(self, settings: ReplicaSettings):
        limits = replace(settings.limits, queue=AHEAD * settings.limits.batch)
        loaded = settings.models, settings.device, settings.dtype, settings.videos, settings.lora, settings.steps
        # Serve sends requests to a replica that is complete.
        engine, self._maker = start_engines(load_models(*loaded), limits, settings.lora)
        # A replica whose engine has failed would refuse every request at once, and so be sent most of them.
        engine.on_failure = partial(os._exit, 1)
        self._backend = EngineBackend(engine)

    async def describe(self) -> tuple[dict[str, ModelInfo], dict[str, ModelInfo]]:
        """The abilities of the models of images, and of those of videos."""
        return self._backend.models, self._maker.models if self._maker else {}

    async def generate(self, request: Request) -> AsyncIterator[int | Progress | Result | Exception]:
        """The number of tokens, then the progress whenever there are previews, then the result; or the reason why
        there is none. Ends the request when the iterator is closed."""
        events, loop = asyncio.Queue(), asyncio.get_running_loop()

        def put(item: Progress | None) -> None:
            # Called in the engine's thread.
            if item is None or item.previews is not None:
                loop.call_soon_threadsafe(events.put_nowait, item)

        try:
            ticket = await self._backend.submit(request, put)
        except (Refused, Cancelled) as error:
            yield error
            return
        ticket.future.add_done_callback(lambda _: put(None))
        try:
            yield ticket.tokens
            while (progress := await events.get()) is not None:
                yield progress
            error = ticket.future.exception(0)
            if error is not None and not isinstance(error, Refused | Cancelled):
                raise error
            yield error or ticket.result(0)
        finally:
            ticket.cancel()

    async def check_video(self, request: VideoRequest) -> AsyncIterator[Refused | None]:
        """Why a video is refused, or None."""
        assert self._maker is not None
        try:
            self._maker.check(request)
            yield None
        except Refused as error:
            yield error

    async def generate_video(self, request: VideoRequest) -> AsyncIterator[VideoProgress | Refused]:
        """The progress of a video without its frames, then the last one with them; or why it is refused. Ends the
        video when the iterator is closed."""
        events, loop, stopped = asyncio.Queue(), asyncio.get_running_loop(), threading.Event()

        def work() -> None:
            assert self._maker is not None
            last: Exception | None = None
            try:
                with closing(self._maker.run(request)) as steps:
                    for progress in steps:
                        if stopped.is_set():
                            return
                        sent = progress if progress.finished else replace(progress, frames=[])
                        loop.call_soon_threadsafe(events.put_nowait, sent)
            # Raised or sent below.
            except Exception as error:
                last = error
            loop.call_soon_threadsafe(events.put_nowait, last)

        threading.Thread(target=work, name="arimage-video", daemon=True).start()
        try:
            while (event := await events.get()) is not None:
                if isinstance(event, Exception) and not isinstance(event, Refused):
                    raise event
                yield event
                if isinstance(event, Refused):
                    return
        finally:
            stopped.set()

    async def collect(self) -> tuple[str, list[Metric]]:
        """The name of the replica and its metrics."""
        from ray import serve

        return serve.get_replica_context().replica_tag, await self._backend.collect()


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


@contextmanager
def run_replicas(settings: ReplicaSettings, least: int, most: int, name: str) -> Iterator[Replicas]:
    """Start replicas on the cluster at RAY_ADDRESS, or on this machine, and end them afterwards. Each has its own GPU,
    or on the CPU its share of this process's threads.

    Args:
        least, most: how many there are; Serve adds replicas up to `most` while each has more requests than fit its
            batch, and takes them away again when they are idle.
        name: the name of the application in Serve. It replaces one with the same name.

    Raises:
        ValueError: if Ray Serve is not installed, this machine has too few GPUs or cores, or no replica starts.
    """
    # Ray reads these when it is imported. By default it reports its usage, and waits 0.1 seconds for the length of a
    # replica's queue; an engine on the CPU may keep its process from answering for longer.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S", "1")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise ValueError("--replicas needs Ray Serve: pip install 'arimage[ray-serve]'") from error

    # It warns of every request that waits for a replica.
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    on_cluster = "RAY_ADDRESS" in os.environ
    if on_cluster:
        ray.init(logging_level=logging.ERROR)
        gpus = int(ray.cluster_resources().get("GPU", 0))
    else:
        gpus = torch.cuda.device_count()
    on_gpu = settings.device == "cuda" or (settings.device is None and gpus > 0)
    if not on_cluster:
        found, what = (gpus, "GPUs") if on_gpu else (os.cpu_count() or 1, "CPU cores")
        if found < most:
            raise ValueError(
                f"--replicas asks for {most} {what}, and this machine has {found}: ask for fewer, or set RAY_ADDRESS "
                "to a cluster's"
            )
        ray.init("local", logging_level=logging.ERROR, include_dashboard=False)
    stopped = threading.Event()
    try:
        # An error of a replica is raised below. On a cluster, the controller warns that replicas wait for machines.
        level = "WARNING" if on_cluster else "CRITICAL"
        serve.start(proxy_location="Disabled", logging_config={"log_level": level})
        device = "cuda" if on_gpu else "cpu"
        application = deployment_of(settings.limits, device, least, most).bind(_for_workers(settings, device))
        try:
            handle = serve.run(application, name=name, route_prefix=None)
        except RuntimeError as error:
            *_, last = serve.status().applications[name].deployments[Replica.__name__].message.splitlines()
            raise ValueError(last.removeprefix("ValueError: ")) from error
        models, videos = handle.describe.remote().result()
        running, streams = AHEAD * settings.limits.batch * most, handle.options(stream=True)
        maker = RemoteVideos(streams, videos, settings.limits, most) if videos else None
        replicas = Replicas(streams, models, settings.limits, running, maker)
        threading.Thread(target=_watch, args=(replicas, stopped), daemon=True).start()
        yield replicas
    finally:
        stopped.set()
        if on_cluster:
            serve.delete(name)
        ray.shutdown()


def _watch(replicas: Replicas, stopped: threading.Event) -> None:
    """End the server when Ray's process on this machine has ended: no replica would be sent a request or started."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    while not stopped.wait(HEALTH_SECONDS):
        if not any(node["NodeID"] == own and node["Alive"] for node in ray.nodes()):
            replicas.fail(RuntimeError("Ray has ended on this machine: start again"))
            return


def deployment_of(limits: Limits, device: str, least: int, most: int) -> Any:
    """Serve's deployment of `least` to `most` replicas on "cpu" or "cuda"."""
    from ray import serve

    count: dict[str, Any] = {"num_replicas": least}
    if least < most:
        bounds = {"min_replicas": least, "max_replicas": most, "target_ongoing_requests": limits.batch}
        count = {"autoscaling_config": bounds}
    threads = max(torch.get_num_threads() // most, 1)
    return serve.deployment(
        Replica,
        **count,
        ray_actor_options={"num_gpus": 1} if device == "cuda" else {"num_cpus": threads},
        max_ongoing_requests=AHEAD * limits.batch,
        # An error of the models is the same in every replica.
        max_constructor_retry_count=1,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=FINISHING_SECONDS,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )


def _for_workers(settings: ReplicaSettings, device: str) -> ReplicaSettings:
    """The settings with absolute paths, since other processes may have another working directory."""

    def model(name: str) -> str:
        folder = local_folder(name)
        return name if folder is None else str(folder.resolve())

    def adapter(text: str) -> str:
        source, scale = parse_lora(text)
        return f"{Path(source).resolve()}:{scale}" if Path(source).exists() else text

    always, named = split_adapters(settings.lora or [])
    lora = [*map(adapter, always), *(f"{name}={adapter(text)}" for name, text in named.items())]
    models = [model(name) for name in settings.models or []]
    return replace(settings, device=device, models=models or None, lora=lora or None)


def application_name(address: int | Path) -> str:
    """The name in Serve of the server on this machine and port, or Unix socket."""
    own = str(address) if isinstance(address, int) else "-".join(address.resolve().parts[1:])
    return f"arimage-{socket.gethostname()}-{own}"
