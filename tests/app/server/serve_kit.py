"""A stand-in for Ray Serve: replicas in this process, and the two backends of a server that keep the same promises."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
from ray.serve.exceptions import RequestCancelledError

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.server.replicas import replica as module
from arimage.app.server.replicas.replica import AHEAD, Replica, ReplicaSettings
from arimage.app.server.replicas.replicas import RemoteVideos, Replicas


BACKENDS = ("engine", "replicas")


class Answers:
    """What a replica answers to one request, as Serve hands it over: the replica goes on whether or not they are
    read."""

    def __init__(self, iterator):
        self._answers, self._error = asyncio.Queue(), None
        self._loop, self._task = asyncio.get_running_loop(), asyncio.ensure_future(self._produce(iterator))

    async def _produce(self, iterator):
        try:
            async for answer in iterator:
                self._answers.put_nowait((answer, None))
            self._answers.put_nowait((None, StopAsyncIteration()))
        except asyncio.CancelledError:
            self._answers.put_nowait((None, self._error))
        finally:
            await iterator.aclose()

    def __aiter__(self):
        return self

    async def __anext__(self):
        answer, error = await self._answers.get()
        if error is not None:
            raise error
        return answer

    def cancel(self, error=None):
        self._error = error or RequestCancelledError("id")
        self._loop.call_soon_threadsafe(self._task.cancel)


class VideoAnswers:
    """What a replica answers to a request for a video, read by a thread without a loop."""

    def __init__(self, iterator):
        self._loop, self._iterator = asyncio.new_event_loop(), iterator

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return self._loop.run_until_complete(anext(self._iterator))
        except StopAsyncIteration:
            raise StopIteration from None

    def cancel(self):
        self._loop.run_until_complete(self._iterator.aclose())
        self._loop.close()


class Handle:
    """Sends requests to replicas in turn, each with at most `room` at a time, and calls all of them, as the handle of
    Serve does."""

    def __init__(self, replicas: list[Replica], room: int = AHEAD * Limits().batch):
        self.replicas, self.answers, self.generate = replicas, [], SimpleNamespace(remote=self._remote)
        self.videos = 0
        self._rooms = [asyncio.Semaphore(room) for _ in replicas]

        for method in ("check_video", "generate_video"):
            setattr(self, method, SimpleNamespace(remote=partial(self._video, method)))

    def _video(self, method, request):
        self.videos += method == "generate_video"
        return VideoAnswers(getattr(self.replicas[self.videos % len(self.replicas)], method)(request))

    def _remote(self, request):
        number = len(self.answers) % len(self.replicas)
        self.answers.append(Answers(self._answer(number, request)))
        return self.answers[-1]

    async def _answer(self, number, request):
        async with self._rooms[number]:
            answers = self.replicas[number].generate(request)
            try:
                async for answer in answers:
                    yield answer
            finally:
                await answers.aclose()

    def broadcast(self, method):
        async def results(timeout_s, return_exceptions):
            answers = [getattr(replica, method)() for replica in self.replicas]
            return await asyncio.gather(*answers, return_exceptions=return_exceptions)

        return SimpleNamespace(results_async=results)


def replica_of(pipelines: dict, limits: Limits) -> Replica:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_models", lambda *_: pipelines)
        return Replica(ReplicaSettings(None, "cpu", "auto", None, limits))


@contextmanager
def replicas_of(handle: Handle, limits: Limits) -> Iterator[Replicas]:
    """The backend of replicas, whose engines end with it."""
    models, videos = asyncio.run(handle.replicas[0].describe())
    maker = RemoteVideos(handle, videos, limits, len(handle.replicas)) if videos else None
    yield Replicas(handle, models, limits, AHEAD * limits.batch * len(handle.replicas), maker)
    for replica in handle.replicas:
        replica._backend._engine.close()


@contextmanager
def backend_of(kind: str, pipelines: dict, limits: Limits) -> Iterator[tuple[Engine | Replicas, Engine]]:
    """A backend of `BACKENDS`, and the engine that generates its images. The caller closes the backend."""
    if kind == "engine":
        engine = Engine(pipelines, limits)
        yield engine, engine
        return
    handle = Handle([replica_of(pipelines, limits)], AHEAD * limits.batch)
    with replicas_of(handle, limits) as replicas, pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.serve.get_replica_context", lambda: SimpleNamespace(replica_tag="one"))
        yield replicas, handle.replicas[0]._backend._engine
