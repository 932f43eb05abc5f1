"""An engine in a process of Ray Serve."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client import Metric

from ....cli.options import Steps
from ...engine.models import ModelInfo, load_models
from ...engine.start import start_engines
from ...engine.types import Cancelled, Limits, Progress, Refused, Request, Result
from ...engine.videos import VideoProgress, VideoRequest
from ..backend import EngineBackend


# Requests that a replica has at a time, per image of its batch: while as many wait as are generated, the batch stays
# full. The others wait in the server, where they do not end with a replica and go to the first one with room.
AHEAD = 2


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
        """The number of tokens, then the progress whenever there are previews, then the result, or the error that
        ended the request. Closing the iterator ends it too."""
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
