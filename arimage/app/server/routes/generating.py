"""From the fields of a request to its images: what the routes that generate images share."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from io import BytesIO
from typing import Any, TypeVar

import anyio.to_thread
from fastapi import Request as HTTPRequest
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive

from ...engine.types import Cancelled, Progress, Refused, Request, Result, Unavailable
from ...engine.uploads import read_upload, reduce_uploads
from ..backend import Submitted
from ..bodies import Uploads
from ..errors import Problem, failure, gone
from ..middleware import PICTURES
from ..state import ServerState, client_of
from .leniency import adapt, whole_mask
from .schemas import MEDIA_TYPES, Fields, Notes, read_mask


logger = logging.getLogger(__name__)

# A stream without events gets a comment after this many seconds: proxies close a silent connection after 60.
HEARTBEAT_SECONDS = 15

T = TypeVar("T")


async def prepared(http: HTTPRequest, state: ServerState, fields: Fields, uploads: Uploads) -> tuple[Request, Notes]:
    """The request for the engine, with its images as large as the model needs them."""
    work = partial(_read, http, state, fields, uploads)
    return await anyio.to_thread.run_sync(work, limiter=state.decoders if uploads else None)


def _read(http: HTTPRequest, state: ServerState, fields: Fields, uploads: Uploads) -> tuple[Request, Notes]:
    limits, models = state.backend.limits, state.backend.models
    model = http.state.about.model = state.model_of(fields.model, models)
    info = models[model]
    files, masks = uploads.get("image", []), uploads.get("mask", [])
    # The mask is that of the first image. A model that reads no references needs one.
    masked = bool(masks or (files and not info.references))
    if len(files) - masked > info.references:
        asked = f"send at most {info.references}" if info.references else "send one image"
        raise Refused(
            f"{model} takes {info.references or 'no'} reference images, not {len(files) - masked}: {asked}", "image"
        )
    image = mask = edited = None
    if masked:
        image = read_upload("image", BytesIO(files[0]), limits)
        if masks:
            mask = read_mask(image, read_upload("mask", BytesIO(masks[0]), limits))
        elif (mask := whole_mask(image) if state.lenient else None) is not None:
            edited = "whole"
        else:
            mask = read_mask(image, None)
    request, ignored = fields.to_request(model, client_of(http), image, mask), []
    if state.lenient:
        request, ignored = adapt(request, info, limits)
    request = reduce_uploads(
        request, info, [partial(read_upload, "image", BytesIO(file), limits) for file in files[masked:]]
    )
    if fields.background == "transparent":
        ignored.append("background")
    extra = fields.model_extra or {}
    notes = Notes(sorted([*ignored, *extra]), edited)
    # They may be large, and a request may wait for long.
    extra.clear()
    return request, notes


class Generation:
    """A request that a backend has accepted.

    Args:
        on_first: called when there is a first partial image.

    Attributes:
        ticket: the request in the backend.
    """

    def __init__(self, ticket: Submitted, shown: "asyncio.Queue[Image.Image | None]", on_first: Callable[[], None]):
        self.ticket, self._shown, self._on_first = ticket, shown, on_first

    @classmethod
    async def begin(cls, http: HTTPRequest, state: ServerState, request: Request, notes: Notes) -> "Generation":
        """Submit a request.

        Raises:
            Refused, Cancelled, Unavailable: if it is not accepted.
            Problem: if the client disconnects first, or has too many images already.
        """
        shown, loop, began = asyncio.Queue(), asyncio.get_running_loop(), time.perf_counter()
        seconds = state.metrics.first_partial.labels(request.model)

        # Called in the engine's thread, as `put` is.
        def on_progress(progress: Progress) -> None:
            if progress.previews is not None:
                put(progress.previews[0])

        def put(picture: Image.Image | None) -> None:
            loop.call_soon_threadsafe(shown.put_nowait, picture)

        release = state.quotas.hold(request.client, request.count)
        try:
            ticket = await _unless_gone(state.backend.submit(request, on_progress if request.previews else None), http)
        except BaseException:
            release()
            raise
        notes.tokens = ticket.tokens
        ticket.future.add_done_callback(lambda _: (release(), put(None)))
        return cls(ticket, shown, lambda: seconds.observe(time.perf_counter() - began))

    async def previews(self) -> AsyncIterator[Image.Image | None]:
        """The partial images, and None after each `HEARTBEAT_SECONDS` without one, until the request has ended."""
        first = True
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    picture = await self._shown.get()
            except TimeoutError:
                yield None
                continue
            if picture is None:
                return
            if first:
                self._on_first()
            first = False
            yield picture

    async def result(self, http: HTTPRequest) -> Result:
        """Wait for the images.

        Raises:
            Problem: if the client disconnects first, which ends the request.
            Exception: what has ended the request.
        """

        async def wait() -> Result:
            async for _ in self.previews():
                pass
            return self.ticket.future.result(0)

        try:
            return await _unless_gone(wait(), http)
        finally:
            self.ticket.cancel()


async def files_of(fields: Fields, result: Result) -> list[bytes]:
    """The images of a result as files in the format that was asked for."""
    return [await run_in_threadpool(fields.encode, image) for image in result.images]


def url_of(http: HTTPRequest, state: ServerState, fields: Fields, file: bytes) -> str:
    """The address under which a file can be read for an hour."""
    return f"{state.root_of(http)}{PICTURES}{state.pictures.add(file, MEDIA_TYPES[fields.output_format or 'png'])}"


async def _unless_gone(asked: Coroutine[Any, Any, T], http: HTTPRequest) -> T:
    """What a coroutine returns.

    Raises:
        Problem: if the client disconnects first, which cancels it.
    """
    asking, watching = asyncio.ensure_future(asked), asyncio.ensure_future(disconnected(http.receive))
    try:
        await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise Problem(gone())
        return asking.result()
    finally:
        asking.cancel()
        watching.cancel()


async def disconnected(receive: Receive) -> None:
    """Wait until a client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def sse(data: dict, name: str | None = None) -> str:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(data)}\n\n"


# A comment, which clients skip.
HEARTBEAT = ": keep-alive\n\n"


class EventStream(StreamingResponse):
    """The events of a request, which ends with them, also if the client disconnects before the first.

    Args:
        on_error: the last event after an error, from the error in the form of the OpenAI API.
    """

    def __init__(self, generation: Generation, events: AsyncIterator[str], on_error: Callable[[dict], str]):
        # nginx would collect events until its buffer is full.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_with_errors(events, on_error), media_type="text/event-stream", headers=headers)
        self._ticket = generation.ticket

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()


async def _with_errors(events: AsyncIterator[str], on_error: Callable[[dict], str]) -> AsyncIterator[str]:
    try:
        async for event in events:
            yield event
    except Exception as error:
        if not isinstance(error, Refused | Cancelled | Unavailable):
            logger.exception("a stream failed")
        yield on_error(json.loads(bytes(failure(error).body))["error"])
