"""The routes of the OpenAI Images API."""

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from io import BytesIO
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse

from ..engine.types import Cancelled, Progress, Refused, Request, Result, Unavailable
from ..engine.uploads import read_upload, reduce_uploads
from .backend import Submitted
from .bodies import Uploads, media_type
from .errors import Problem, error_response, failure, gone
from .leniency import adapt, whole_mask
from .middleware import PICTURES
from .schemas import MEDIA_TYPES, EditFields, EmbeddedImages, Fields, Notes, answer, body_of, event, facts, read_mask
from .state import ServerState, State, accepting, authorised, client_of


logger = logging.getLogger(__name__)

router = APIRouter(prefix="/v1/images", dependencies=[Depends(authorised), Depends(accepting)])

T = TypeVar("T")


async def generation_fields(http: HTTPRequest, state: State) -> Fields:
    if media_type(http) != "application/json":
        raise Problem(error_response("the body is not JSON: send Content-Type: application/json", 415))
    with state.bodies.counted(http):
        return Fields.read(await state.bodies.read_json(http), state.lenient)


@router.post("/generations", openapi_extra=body_of(**{"application/json": Fields}))
async def generations(
    http: HTTPRequest, state: State, fields: Annotated[Fields, Depends(generation_fields)]
) -> Response:
    """Generate images from a prompt or a class."""
    request, notes = await _prepared(http, state, fields, {})
    return await _generate(http, state, fields, "image_generation", request, notes)


@router.post("/edits", openapi_extra=body_of(**{"multipart/form-data": Fields, "application/json": EditFields}))
async def edits(http: HTTPRequest, state: State) -> Response:
    """Generate part of an image again: where the mask, or without one the image, is transparent. A model that reads
    reference images reads those without a mask, and those after the first with one."""
    with state.bodies.counted(http):
        fields, uploads = await _read_edit(http, state)
        request, notes = await _prepared(http, state, fields, uploads)
        uploads.clear()
    return await _generate(http, state, fields, "image_edit", request, notes)


async def _read_edit(http: HTTPRequest, state: ServerState) -> tuple[Fields, Uploads]:
    if media_type(http) == "application/json":
        embedded = EmbeddedImages.model_validate_json(await state.bodies.read_json(http))
        fields = Fields.read(embedded.model_extra, state.lenient)
        return fields, await run_in_threadpool(embedded.read)
    if media_type(http) != "multipart/form-data":
        raise Refused(
            "an edit is neither multipart/form-data nor JSON: send image and mask as files, or images as data URLs"
        )
    texts, files = await state.bodies.read_form(http)
    if not {"image"} <= files.keys() <= {"image", "mask"} or len(files.get("mask", [])) > 1:
        found = [name for name, sent in files.items() for _ in sent]
        raise Refused(f"an edit has the files {found}: send image, and mask unless it is transparent", "image")
    return Fields.read(texts, state.lenient, strict=False), files


async def _prepared(http: HTTPRequest, state: ServerState, fields: Fields, uploads: Uploads) -> tuple[Request, Notes]:
    """The request for the engine, with its images as large as the model needs them."""
    work = partial(_read, state, fields, uploads, client_of(http))
    return await anyio.to_thread.run_sync(work, limiter=state.decoders if uploads else None)


def _read(state: ServerState, fields: Fields, uploads: Uploads, client: str) -> tuple[Request, Notes]:
    limits = state.backend.limits
    model = state.model_of(fields.model, state.backend.models)
    info = state.backend.models[model]
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
    request, ignored = fields.to_request(model, client, image, mask), []
    if state.lenient:
        request, ignored = adapt(request, info, limits)
    request = reduce_uploads(
        request, info, [partial(read_upload, "image", BytesIO(file), limits) for file in files[masked:]]
    )
    if fields.background == "transparent":
        ignored.append("background")
    return request, Notes(sorted([*ignored, *(fields.model_extra or {})]), edited)


async def _generate(
    http: HTTPRequest, state: ServerState, fields: Fields, kind: str, request: Request, notes: Notes
) -> Response:
    events, loop = asyncio.Queue(), asyncio.get_running_loop()

    def put(item: Progress | None) -> None:
        # Called in the engine's thread.
        loop.call_soon_threadsafe(events.put_nowait, item)

    on_progress = put if fields.stream and fields.partial_images else None
    ticket = await _unless_gone(state.backend.submit(request, on_progress), http)
    if ticket is None:
        return gone()
    notes.tokens = ticket.tokens
    ticket.future.add_done_callback(lambda _: put(None))
    if fields.stream:
        return EventStream(ticket, _stream(ticket, events, fields, kind, notes))
    try:
        result = await _unless_gone(_wait(ticket, events), http)
    finally:
        ticket.cancel()
    if result is None:
        return gone()
    files = [await run_in_threadpool(fields.encode, image) for image in result.images]
    if fields.response_format == "url":
        media_type = MEDIA_TYPES[fields.output_format or "png"]
        root = f"{state.root_of(http)}{PICTURES}"
        data = [{"url": f"{root}{state.pictures.add(file, media_type)}"} for file in files]
    else:
        data = [{"b64_json": base64.b64encode(file).decode()} for file in files]
    return JSONResponse(answer(result, fields, data, notes))


async def _unless_gone(asked: Coroutine[Any, Any, T], http: HTTPRequest) -> T | None:
    """What a coroutine returns, or None if the client disconnects first, which cancels it."""
    asking, watching = asyncio.ensure_future(asked), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    finally:
        asking.cancel()
        watching.cancel()


async def _wait(ticket: Submitted, events: asyncio.Queue) -> Result:
    while await events.get() is not None:
        pass
    return ticket.future.result(0)


async def _disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """The events of a request, which ends with them, also if the client disconnects before the first."""

    def __init__(self, ticket: Submitted, events: AsyncIterator[str]):
        # nginx would collect events until its buffer is full.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._ticket = ticket

    async def __call__(self, scope, receive, send):
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ticket.cancel()


async def _stream(
    ticket: Submitted, events: asyncio.Queue, fields: Fields, kind: str, notes: Notes
) -> AsyncIterator[str]:
    """Server-sent events: the partial images, then the image or an error."""

    async def message(picture: Image.Image, own: dict) -> str:
        body = event(own, picture, await run_in_threadpool(fields.encode, picture), fields)
        return f"event: {own['type']}\ndata: {json.dumps(body)}\n\n"

    try:
        index = 0
        while (progress := await events.get()) is not None:
            if progress.previews is None:
                continue
            own = {"type": f"{kind}.partial_image", "partial_image_index": index}
            yield await message(progress.previews[0], own)
            index += 1
        result = ticket.future.result(0)
        own = {"type": f"{kind}.completed", "usage": notes.usage, "arimage": facts(result, notes)}
        yield await message(result.images[0], own)
    except Exception as error:
        if not isinstance(error, Refused | Cancelled | Unavailable):
            logger.exception("a stream failed")
        yield f"event: error\ndata: {bytes(failure(error).body).decode()}\n\n"
