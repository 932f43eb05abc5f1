"""The routes of the OpenAI Videos API."""

import asyncio
import re
import secrets
from io import BytesIO
from typing import Annotated, Literal

import anyio.to_thread
from fastapi import APIRouter, Depends, Query
from fastapi import Request as HTTPRequest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import FileResponse, JSONResponse, Response

from ....media.files import to_rgb
from ...engine.types import Refused, Unavailable
from ...engine.uploads import read_upload
from ...engine.videos import VideoRequest
from ..bodies import media_type
from ..errors import Problem, error_response
from ..state import ServerState, State, accepting, authorised, client_of
from ..video_jobs import KEPT_SECONDS, Job, VideoJobs
from .generating import disconnected
from .leniency import nearest_size
from .schemas import SIZE, EmbeddedImage, body_of, size_of


# How long OpenAI's client waits before it asks again, in milliseconds.
POLL_MS = 1000

router = APIRouter(prefix="/v1/videos", dependencies=[Depends(authorised)])


def _seconds(value: object) -> object:
    """OpenAI's client sends a text."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,9})?", value) else value


class VideoFields(BaseModel):
    """The fields of a video, apart from a file."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    prompt: str
    model: str | None = None
    seconds: Annotated[float, BeforeValidator(_seconds), Field(gt=0, le=3600)] | None = None
    size: str | None = Field(None, pattern=SIZE)
    input_reference: EmbeddedImage | None = None

    # Extensions of the OpenAI API.
    seed: int | None = None
    decoding: str | None = Field(None, max_length=200)
    num_frames: int | None = None


def jobs_of(state: State) -> VideoJobs:
    if state.videos is None:
        raise Refused("this server generates no videos: send the request to /v1/images/generations", "model")
    return state.videos


def job_of(name: str, jobs: Annotated[VideoJobs, Depends(jobs_of)]) -> Job:
    job = jobs.get(name)
    if job is None:
        message = f"the video {name[:80]!r} does not exist or has expired: create it again"
        raise Problem(error_response(message, 404, "video_id"))
    return job


Jobs = Annotated[VideoJobs, Depends(jobs_of)]
Named = Annotated[Job, Depends(job_of)]


@router.post(
    "",
    dependencies=[Depends(accepting)],
    openapi_extra=body_of(**{"multipart/form-data": VideoFields, "application/json": VideoFields}),
)
async def create(http: HTTPRequest, state: State, jobs: Jobs) -> dict:
    """Queue a video from a prompt, and perhaps from its first frame."""
    with state.bodies.counted(http):
        fields, file = await _read(http, state)
        request = await anyio.to_thread.run_sync(_request, state, jobs, fields, file, limiter=state.decoders)
        # Replicas are asked whether they take it.
        job = await run_in_threadpool(jobs.add, request, client_of(http))
    return described(job)


@router.get("")
async def listed(
    http: HTTPRequest,
    state: State,
    jobs: Jobs,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> dict:
    """The videos of this client."""
    found = jobs.of(client_of(http))
    if order == "desc":
        found.reverse()
    begin = next((place for place, job in enumerate(found, start=1) if job.id == after), 0)
    page = found[begin : begin + limit]
    ends = {"first_id": page[0].id, "last_id": page[-1].id} if page else {"first_id": None, "last_id": None}
    has_more = begin + limit < len(found)
    return {"object": "list", "data": [described(job) for job in page], "has_more": has_more, **ends}


@router.get("/{name}")
async def retrieve(job: Named) -> Response:
    """How far a video is."""
    return JSONResponse(described(job), headers={"openai-poll-after-ms": str(POLL_MS)})


@router.get("/{name}/content")
async def content(job: Named, variant: Literal["video", "thumbnail", "spritesheet"] = "video") -> Response:
    """A finished video as .mp4, its first frame as .webp, or a sheet of its frames as .jpg."""
    if job.status != "completed":
        error = "failed" if job.status == "failed" else "not finished"
        return error_response(f"the video is {error}: retrieve it to see its status", 409, "video_id")
    return Download(job, variant)


class Download(FileResponse):
    """A file of a job, or a range of it. Of a video it notes how much a client has got that has not hung up."""

    def __init__(self, job: Job, variant: str):
        super().__init__(job.files[variant])
        self._job, self._counts = job, variant == "video"

    async def __call__(self, scope, receive, send):
        head, begin, end = scope["state"]["head"], 0, 0

        leaving = asyncio.ensure_future(disconnected(receive))

        async def shared_receive():
            await asyncio.shield(leaving)
            return {"type": "http.disconnect"}

        async def watched_send(message):
            nonlocal begin, end
            if leaving.done():
                return
            if message["type"] == "http.response.start":
                if message["status"] >= 400:
                    asked = "the header Range cannot be served: ask for bytes=0-, or leave it out"
                    raise Problem(error_response(asked, message["status"]))
                headers = Headers(raw=message["headers"])
                if message["status"] == 200:
                    end = int(headers["content-length"])
                # Without this header there are several ranges, which do not count.
                elif found := re.match(r"bytes (\d+)-(\d+)/", headers.get("content-range", "")):
                    begin, end = int(found[1]), int(found[2]) + 1
                await send(message)
            elif message["more_body"]:
                await send(message)
            else:
                # The empty message waits until the client has taken what is before it.
                await send({**message, "more_body": True})
                await send({**message, "body": b""})
                if self._counts and not (head or leaving.done()) and begin <= self._job.fetched:
                    self._job.fetched = max(self._job.fetched, end)

        try:
            await super().__call__({**scope, "method": "HEAD" if head else "GET"}, shared_receive, watched_send)
        finally:
            leaving.cancel()


@router.delete("/{name}")
async def delete(job: Named, jobs: Jobs) -> dict:
    """Delete a video; one that is being generated is ended."""
    jobs.delete(job)
    return {"id": job.id, "object": "video.deleted", "deleted": True}


async def _read(http: HTTPRequest, state: ServerState) -> tuple[VideoFields, bytes | None]:
    if media_type(http) == "application/json":
        body = await state.bodies.read_json(http)
        fields, files = VideoFields.model_validate_json(body, strict=not state.lenient), {}
    elif media_type(http) == "multipart/form-data":
        texts, files = await state.bodies.read_form(http)
        fields = VideoFields.model_validate(texts)
    else:
        raise Refused("a video is neither multipart/form-data nor JSON: send its fields as one of the two")
    given = [*files.get("input_reference", []), *([fields.input_reference] if fields.input_reference else [])]
    if files.keys() - {"input_reference"} or len(given) > 1:
        raise Refused("a video has at most one file, input_reference: leave out the others", "input_reference")
    unknown = sorted(fields.model_extra or {})
    if unknown and not state.lenient:
        message = f"unknown field {unknown[0]!r}: leave it out"
        raise Problem(error_response(message, 400, unknown[0], "unknown_parameter"))
    [file] = given or [None]
    return fields, file.read("input_reference") if isinstance(file, EmbeddedImage) else file


def _request(state: ServerState, jobs: VideoJobs, fields: VideoFields, file: bytes | None) -> VideoRequest:
    model = state.model_of(fields.model, jobs.models)
    info, frames, size = jobs.models[model], fields.num_frames, size_of(fields.size)
    if frames is None and fields.seconds is not None:
        asked = fields.seconds * info.fps
        frames = min(info.frame_counts, key=lambda count: abs(count - asked))
        # Frames at the ends of a clip: 81 at 16 per second are 5 seconds.
        if abs(frames - asked) > 1 and not state.lenient:
            choices = ", ".join(f"{count / info.fps:.3g}" for count in sorted(info.frame_counts))
            raise Refused(f"{model} does not generate {fields.seconds:g} seconds: choose among {choices}", "seconds")
    if size is not None and state.lenient:
        size = nearest_size(size, info.sizes)
    image = None
    if file is not None:
        image = to_rgb("input_reference", read_upload("input_reference", BytesIO(file), jobs.limits))
        image.thumbnail((2 * max(info.sizes[0]), 2 * max(info.sizes[0])))
    seed = secrets.randbelow(2**32) if fields.seed in (None, -1) else fields.seed
    height, width = size or info.sizes[0]
    return VideoRequest(model, fields.prompt, seed, fields.decoding, image, frames, height, width)


def described(job: Job) -> dict:
    """A job in the form of the OpenAI API. Fields that it does not have are under "arimage"."""
    error = None
    if job.error is not None:
        refused = isinstance(job.error, Refused)
        told = isinstance(job.error, Refused | Unavailable)
        text = str(job.error) if told else "the video could not be generated: see the log of the server"
        error = {"code": "invalid_request" if refused else "server_error", "message": text}
    return {
        "id": job.id,
        "object": "video",
        "created_at": int(job.created),
        "completed_at": int(job.ended) if job.ended and job.status == "completed" else None,
        "expires_at": int(job.ended + KEPT_SECONDS) if job.ended else None,
        "model": job.request.model,
        "prompt": job.request.prompt,
        "status": job.status,
        "progress": job.progress,
        "seconds": f"{job.frames / job.fps:.3g}",
        "size": f"{job.size[1]}x{job.size[0]}",
        "error": error,
        "remixed_from_video_id": None,
        "arimage": {"seed": job.request.seed, "frames": job.frames, "fps": job.fps, **job.facts},
    }
