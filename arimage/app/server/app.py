"""The OpenAI Images API for an engine."""

import asyncio
import base64
import json
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from io import BytesIO
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from ..engine.engine import Engine
from ..engine.types import Cancelled, Progress, Refused, Request, Result, Unavailable
from ..engine.validation import read_upload
from .auth import check_addresses, local_only
from .backend import Backend, EngineBackend, Submitted
from .index_page import home_page
from .leniency import Leniency
from .metrics import RequestMetrics, exposition
from .middleware import PICTURES, Gate, TooLarge, too_large
from .schemas import (
    MAX_FILES,
    MEDIA_TYPES,
    EditFields,
    EmbeddedImages,
    Fields,
    LenientFields,
    Notes,
    answer,
    describe_model,
    error_response,
    event,
    facts,
    failure,
    read_mask,
)


logger = logging.getLogger(__name__)

# How long the body of a request may take to arrive, in seconds.
BODY_SECONDS = 30
# The files of an edit, by field.
Uploads = dict[str, list[bytes]]
# Images whose URL was asked for: how many are stored, and for how many seconds.
KEPT, KEPT_SECONDS = 128, 3600

# Where the description of the API has what the body of an edit consists of.
_DEFINITION = "#/paths/~1v1~1images~1edits/post/requestBody/content/application~1json/schema/$defs/{model}"

T = TypeVar("T")


class KeptImages:
    """Files in memory under random names: the newest `KEPT`, each for `KEPT_SECONDS`."""

    def __init__(self):
        self._files: OrderedDict[str, tuple[float, bytes, str]] = OrderedDict()

    def add(self, data: bytes, media_type: str) -> str:
        name = secrets.token_urlsafe(24)
        self._files[name] = (time.monotonic() + KEPT_SECONDS, data, media_type)
        while len(self._files) > KEPT or next(iter(self._files.values()))[0] < time.monotonic():
            self._files.popitem(last=False)
        return name

    def get(self, name: str) -> tuple[bytes, str] | None:
        expires, data, media_type = self._files.get(name, (0.0, b"", ""))
        return (data, media_type) if expires > time.monotonic() else None


def build_server(
    engine: Engine | Backend,
    *,
    token: str | None = None,
    base_url: str | None = None,
    host: str = "127.0.0.1",
    aliases: Mapping[str, str] | None = None,
    leniency: Leniency = Leniency(),  # noqa: B008
    allow_origin: Sequence[str] = (),
) -> FastAPI:
    """The application: the OpenAI Images API, a page about the server at /, /health, and /metrics for Prometheus.

    Args:
        engine: generates the images, an engine or the replicas of one; the caller closes it.
        token: the bearer token that clients must send, except for /health and the URLs of images; None lets everybody
            in.
        base_url: the public URL of the server, with which the URLs of images begin; by default the one that the client
            used.
        host: the interface on which it listens. Without a token, a server on a loopback interface answers only
            requests to a loopback address or to `base_url`, and none from pages of other sites.
        aliases: other names for models, for clients that send fixed names.
        leniency: requests that are answered although they ask for something that the server or the model lacks.
        allow_origin: sites, as in "https://chat.example.org", whose pages may send requests.

    Raises:
        ValueError: if `base_url` does not begin with http:// or https://, or an origin has another form.
    """
    check_addresses(base_url, allow_origin)
    app = FastAPI(title="arimage", docs_url=None, redoc_url=None)
    backend = EngineBackend(engine) if isinstance(engine, Engine) else engine
    metrics, kept, started = RequestMetrics(), KeptImages(), int(time.time())
    limits, default_model = backend.limits, next(iter(backend.models))
    names = {name: name for name in backend.models} | dict(aliases or {})
    # An image with its mask, and references, in base64.
    references = max(info.references for info in backend.models.values())
    max_body = (1 + references) * limits.upload_bytes * 4 // 3 + 2**16
    protection = [] if token is not None else local_only(host, base_url, allow_origin)
    if allow_origin:
        allowed = {"allow_origins": allow_origin, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
        protection.insert(0, Middleware(CORSMiddleware, **allowed))
    app.user_middleware += [*protection, Middleware(Gate, token=token, max_body=max_body, metrics=metrics)]
    _add_error_handlers(app, max_body)

    form_of = LenientFields if leniency.ignore_unknown_fields else Fields

    def root_of(http: HTTPRequest) -> str:
        """The URL of this server, as its clients know it."""
        return (base_url or str(http.base_url)).rstrip("/")

    def model_of(name: str) -> str:
        """The model with this name or alias."""
        if name not in names and leniency.any_model:
            return default_model
        if name not in names:
            raise Refused(f"unknown model {name[:80]!r}: choose among {', '.join(names)}", "model")
        return names[name]

    def read(fields: Fields, uploads: Uploads) -> tuple[Request, list[str], str | None]:
        """The request, the fields of it that are ignored, and what of its image is edited, if not what its mask
        says."""
        model = model_of(fields.model or default_model)
        info = backend.models[model]
        opened = {
            name: [read_upload(name, BytesIO(data), limits) for data in files] for name, files in uploads.items()
        }
        images, masks = opened.get("image", []), opened.get("mask", [])
        image = mask = edited = None
        # The mask is that of the first image. A model that reads no references needs one.
        if masks or (images and not info.references):
            image, *images = images
            mask = None if masks else leniency.whole_mask(image)
            edited = None if mask is None else "whole"
            if mask is None:
                mask = read_mask(image, masks[0] if masks else None)
        request = fields.to_request(model, image, mask, tuple(images))
        request, ignored = leniency.adapt(request, info, limits)
        return request, sorted([*ignored, *(fields.model_extra or {})]), edited

    async def body_of(http: HTTPRequest) -> bytes:
        async with asyncio.timeout(BODY_SECONDS):
            return await http.body()

    async def generate(http: HTTPRequest, fields: Fields, kind: str, uploads: Uploads) -> Response:
        events, loop = asyncio.Queue(), asyncio.get_running_loop()

        def put(item: Progress | None) -> None:
            # Called in the engine's thread.
            loop.call_soon_threadsafe(events.put_nowait, item)

        on_progress = put if fields.stream and fields.partial_images else None
        request, ignored, edited = await run_in_threadpool(read, fields, uploads)
        ticket = await _unless_gone(backend.submit(request, on_progress), http)
        if ticket is None:
            return gone()
        notes = Notes(ignored, edited, ticket.tokens)
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
            root = root_of(http)
            media_type = MEDIA_TYPES[fields.output_format or "png"]
            data = [{"url": f"{root}{PICTURES}{kept.add(file, media_type)}"} for file in files]
        else:
            data = [{"b64_json": base64.b64encode(file).decode()} for file in files]
        return JSONResponse(answer(result, fields, data, notes))

    @app.post("/v1/images/generations", openapi_extra=_body({"application/json": Fields.model_json_schema()}))
    async def generations(http: HTTPRequest) -> Response:
        """Generate images from a prompt or a class."""
        if _media_type(http) != "application/json":
            return error_response("the body is not JSON: send Content-Type: application/json", 415)
        fields = form_of.model_validate_json(await body_of(http))
        return await generate(http, fields, "image_generation", {})

    @app.post(
        "/v1/images/edits",
        openapi_extra=_body(
            {
                "multipart/form-data": Fields.model_json_schema(),
                "application/json": EditFields.model_json_schema(ref_template=_DEFINITION),
            }
        ),
    )
    async def edits(http: HTTPRequest) -> Response:
        """Generate part of an image again: where the mask, or without one the image, is transparent. A model that
        reads reference images reads those without a mask, and those after the first with one."""
        if _media_type(http) == "application/json":
            embedded = EmbeddedImages.model_validate_json(await body_of(http))
            fields = form_of.model_validate(embedded.model_extra)
            return await generate(http, fields, "image_edit", await run_in_threadpool(embedded.read))
        if _media_type(http) != "multipart/form-data":
            raise Refused(
                "an edit is neither multipart/form-data nor JSON: send image and mask as files, or images as data URLs"
            )
        parser = MultiPartParser(http.headers, http.stream(), max_files=MAX_FILES, max_fields=64, max_part_size=2**16)
        # Uploads stay in memory.
        parser.spool_max_size = max_body + 1
        async with asyncio.timeout(BODY_SECONDS):
            form = await parser.parse()
        texts: dict[str, str] = {}
        files: Uploads = {}
        for name, value in form.multi_items():
            name = name if isinstance(value, str) else name.removesuffix("[]")
            if name in texts or (name in files and name != "image"):
                raise Refused(f"the field {name} is sent several times: send it once", name)
            if isinstance(value, str):
                texts[name] = value
            else:
                files.setdefault(name, []).append(await value.read())
        if not {"image"} <= files.keys() <= {"image", "mask"}:
            raise Refused(
                f"an edit has the files {sorted(files)}: send image, and mask unless it is transparent", "image"
            )
        return await generate(http, form_of.model_validate(texts), "image_edit", files)

    @app.get(PICTURES + "{name}")
    async def picture(name: str) -> Response:
        """An image whose URL was asked for."""
        found = kept.get(name)
        if found is None:
            return error_response("this image does not exist or has expired: generate it again", 404)
        return Response(found[0], media_type=found[1], headers={"Cache-Control": "private, max-age=3600"})

    @app.get("/v1/models")
    async def models() -> dict:
        """The models of this server and their abilities."""
        data = [describe_model(name, model, backend.models[model], started) for name, model in names.items()]
        return {"object": "list", "data": data}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict:
        """The abilities of one model."""
        model = model_of(name)
        return describe_model(name, model, backend.models[model], started)

    @app.get("/", include_in_schema=False)
    async def home(http: HTTPRequest) -> Response:
        return HTMLResponse(home_page(names, root_of(http)))

    @app.get("/health")
    async def health() -> Response:
        """200 while the engine runs, 503 after it was closed or has failed."""
        return JSONResponse({"status": "ok" if backend.alive else "closed"}, 200 if backend.alive else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        text = exposition([*metrics.registry.collect(), *await backend.collect()])
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return app


async def _unless_gone(asked: Coroutine[Any, Any, T], http: HTTPRequest) -> T | None:
    """What a coroutine returns, or None if the client disconnects first, which cancels it."""
    asking, watching = asyncio.ensure_future(asked), asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({asking, watching}, return_when=asyncio.FIRST_COMPLETED)
        return asking.result() if asking.done() else None
    finally:
        asking.cancel()
        watching.cancel()


def gone() -> Response:
    """Nobody reads this. nginx logs this status when a client has disconnected."""
    return Response(status_code=499)


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
        super().__init__(events, media_type="text/event-stream")
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


def _body(schemas: dict[str, dict]) -> dict:
    content = {media_type: {"schema": schema} for media_type, schema in schemas.items()}
    return {"requestBody": {"required": True, "content": content}}


def _media_type(http: HTTPRequest) -> str:
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()


def _add_error_handlers(app: FastAPI, max_body: int) -> None:
    """Answer every error in the form that OpenAI's clients expect."""

    async def answer_to(http: HTTPRequest, error: Exception) -> Response:
        match error:
            case ValidationError():
                first = error.errors(include_url=False, include_input=False)[0]
                name = ".".join(map(str, first["loc"])) or None
                if first["type"] == "extra_forbidden":
                    return error_response(f"unknown field {name!r}: leave it out", 400, name, "unknown_parameter")
                return error_response(f"{name or 'the body'} is not valid: {first['msg']}", 400, name)
            case MultiPartException():
                return error_response(f"the form cannot be read: {error.message}", 400)
            case TooLarge():
                return too_large(max_body)
            case TimeoutError():
                return error_response(f"the body did not arrive within {BODY_SECONDS} seconds: send it faster", 408)
            case ClientDisconnect():
                return gone()
            case HTTPException():
                message = f"{http.method} {http.url.path[:80]}: {error.detail}"
                return error_response(message, error.status_code, headers=error.headers)
            case _:
                return failure(error)

    of_bodies = (ValidationError, MultiPartException, TooLarge, TimeoutError, ClientDisconnect, HTTPException)
    for kind in (*of_bodies, Refused, Cancelled, Unavailable, Exception):
        app.add_exception_handler(kind, answer_to)
