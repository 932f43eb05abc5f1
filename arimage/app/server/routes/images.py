"""The routes of the OpenAI Images API."""

import base64
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from PIL import Image
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ...engine.types import Refused, Request
from ..bodies import Uploads, media_type
from ..state import ServerState, State, accepting, authorised
from .generating import HEARTBEAT, EventStream, Generation, files_of, prepared, sse, url_of
from .schemas import EditFields, EmbeddedImages, Fields, Notes, answer, body_of, event, facts


# The prompt of a variation without one.
VARIATION = "a variation of this image"

router = APIRouter(prefix="/v1/images", dependencies=[Depends(authorised), Depends(accepting)])


async def generation_fields(http: HTTPRequest, state: State) -> Fields:
    with state.bodies.counted(http):
        return Fields.read(await state.bodies.read_json(http), state.lenient)


@router.post("/generations", openapi_extra=body_of(**{"application/json": Fields}))
async def generations(
    http: HTTPRequest, state: State, fields: Annotated[Fields, Depends(generation_fields)]
) -> Response:
    """Generate images from a prompt or a class."""
    request, notes = await prepared(http, state, fields, {})
    return await _generate(http, state, fields, "image_generation", request, notes)


@router.post("/edits", openapi_extra=body_of(**{"multipart/form-data": Fields, "application/json": EditFields}))
async def edits(http: HTTPRequest, state: State) -> Response:
    """Generate part of an image again: where the mask, or without one the image, is transparent. A model that reads
    reference images reads those without a mask, and those after the first with one."""
    with state.bodies.counted(http):
        fields, uploads = await _read_edit(http, state)
        request, notes = await prepared(http, state, fields, uploads)
        uploads.clear()
    return await _generate(http, state, fields, "image_edit", request, notes)


@router.post("/variations", openapi_extra=body_of(**{"multipart/form-data": Fields}))
async def variations(http: HTTPRequest, state: State) -> Response:
    """Generate images like a given one, with a model that reads reference images."""
    if media_type(http) != "multipart/form-data":
        raise Refused("a variation is not multipart/form-data: send image as a file")
    with state.bodies.counted(http):
        texts, files = await state.bodies.read_form(http)
        if files.keys() != {"image"} or len(files["image"]) != 1:
            raise Refused("a variation has one file: send it as image", "image")
        fields = Fields.read(texts, state.lenient, strict=False)
        models = state.backend.models
        model, readers = state.model_of(fields.model, models), [name for name in models if models[name].references]
        if model not in readers:
            asked = f"choose among {', '.join(readers)}, or " if readers else ""
            raise Refused(
                f"{model} reads no images to vary: {asked}send the image with a mask and a prompt to /v1/images/edits",
                "image",
            )
        fields.prompt = fields.prompt or VARIATION
        request, notes = await prepared(http, state, fields, files)
        files.clear()
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


async def _generate(
    http: HTTPRequest, state: ServerState, fields: Fields, kind: str, request: Request, notes: Notes
) -> Response:
    generation = await Generation.begin(http, state, request, notes)
    if fields.stream:
        events = _stream(generation, fields, kind, notes)
        return EventStream(generation, events, lambda error: sse({"error": error}, "error"))
    result = await generation.result(http)
    files = await files_of(fields, result)
    if fields.response_format == "url":
        data = [{"url": url_of(http, state, fields, file)} for file in files]
    else:
        data = [{"b64_json": base64.b64encode(file).decode()} for file in files]
    return JSONResponse(answer(result, fields, data, notes))


async def _stream(generation: Generation, fields: Fields, kind: str, notes: Notes) -> AsyncIterator[str]:
    """Server-sent events: the partial images, then the image."""

    async def message(picture: Image.Image, own: dict) -> str:
        return sse(event(own, picture, await run_in_threadpool(fields.encode, picture), fields), own["type"])

    index = 0
    async for preview in generation.previews():
        if preview is None:
            yield HEARTBEAT
            continue
        yield await message(preview, {"type": f"{kind}.partial_image", "partial_image_index": index})
        index += 1
    result = generation.ticket.future.result(0)
    own = {"type": f"{kind}.completed", "usage": notes.usage, "arimage": facts(result, notes)}
    yield await message(result.images[0], own)
