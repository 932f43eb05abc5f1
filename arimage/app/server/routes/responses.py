"""The route of OpenAI's Responses API with its tool `image_generation`. Responses are not stored."""

import base64
import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ...engine.types import Refused, Result
from ..bodies import Uploads
from ..state import State, accepting, authorised
from .chat import Body, begin, last_of
from .generating import HEARTBEAT, EventStream, Generation, sse
from .schemas import EmbeddedImage, Fields, Notes, body_of, facts


TOOL = "image_generation"
# Fields that need stored responses.
STORED = ("previous_response_id", "conversation", "prompt", "background")
# These, fields that are about text, and those whose absence changes nothing.
WITHOUT_EFFECT = frozenset({
    *STORED, "access_programs", "context_management", "include", "instructions", "max_output_tokens", "max_tool_calls",
    "moderation", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "reasoning", "safety_identifier", "service_tier", "store", "stream_options", "temperature", "text", "tool_choice",
    "top_logprobs", "top_p", "truncation", "user",
})  # fmt: skip
# Codes that OpenAI's type knows, by the type of an error.
CODES = {"invalid_request_error": "invalid_prompt", "rate_limit_error": "rate_limit_exceeded"}

router = APIRouter(prefix="/v1/responses", dependencies=[Depends(authorised), Depends(accepting)])


class Item(BaseModel):
    """A message, or what an earlier response has returned, which is not read."""

    model_config = ConfigDict(extra="allow")

    role: str | None = None
    content: Any = None


class TextPart(BaseModel):
    type: Literal["input_text"]
    text: str


class ImagePart(BaseModel):
    type: Literal["input_image"]
    url: str = Field(validation_alias="image_url")


CONTENT = TypeAdapter(list[Annotated[TextPart | ImagePart, Field(discriminator="type")]])


class ImageTool(BaseModel):
    """The tool. Its further fields are those of `Fields`, which are checked as such."""

    model_config = ConfigDict(extra="allow")

    type: str
    action: Literal["generate", "edit", "auto"] | None = None
    input_image_mask: EmbeddedImage | None = None


class ResponseFields(Body):
    """The body of a request. The model of the tool, if it has one, generates."""

    input: str | list[Item]
    tools: list[ImageTool] | None = None
    metadata: dict[str, str] | None = None

    @property
    def tool(self) -> ImageTool:
        tools = [tool for tool in self.tools or [] if tool.type == TOOL]
        return tools[0] if tools else ImageTool(type=TOOL)

    def read(self, lenient: bool) -> tuple[Fields, Uploads, list[str]]:
        extra = self.model_extra or {}
        for name in STORED:
            if extra.get(name):
                raise Refused(
                    f"{name} needs stored responses, and this server stores none: send the whole input", name
                )
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        prompt, images = last_of("input", items, "input_text", CONTENT)
        tool = self.tool
        given = dict(tool.model_extra or {})
        own = {"prompt": prompt, "model": given.get("model") or self.model, "stream": self.stream}
        fields = Fields.read(given | own, lenient)
        if fields.n not in (None, 1):
            raise Refused(f"a response has one image, not {fields.n}: leave out n", "n")
        if tool.action == "edit" and not images:
            raise Refused("the action is edit, and the message has no image: send one, or leave out action", "tools")
        files: Uploads = {}
        if images and tool.action != "generate":
            files["image"] = [image.read("input") for image in images]
            if tool.input_image_mask is not None:
                files["mask"] = [tool.input_image_mask.read("mask")]
        skipped = ["tools"] if any(one.type != TOOL for one in self.tools or []) else []
        return fields, files, [*skipped, *self.ignored(WITHOUT_EFFECT, lenient)]

    def forget(self) -> None:
        super().forget()
        self.input, self.tools = "", [self.tool.model_copy(update={"input_image_mask": None})]


@router.post("", openapi_extra=body_of(**{"application/json": ResponseFields}))
async def create(http: HTTPRequest, state: State) -> Response:
    """Generate an image from the last message of the user, and from its images."""
    asked, fields, notes, generation = await begin(http, state, ResponseFields)
    answers = Answers(asked, fields, http.state.about.model, notes)
    if fields.stream:
        return EventStream(generation, answers.stream(generation), answers.failed)
    result = await generation.result(http)
    return JSONResponse(answers.completed(await answers.item(result.images[0]), result))


class Answers:
    """The answers to one request."""

    def __init__(self, asked: ResponseFields, fields: Fields, model: str, notes: Notes):
        self._fields, self._notes, self._item = fields, notes, f"ig_{secrets.token_hex(16)}"
        self._events = 0
        tool = asked.tool.model_dump(exclude_none=True)
        self._own = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "metadata": asked.metadata or {},
            "tools": [tool],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "incomplete_details": None,
            "instructions": None,
            "previous_response_id": None,
            "store": False,
        }

    def completed(self, item: dict, result: Result) -> dict:
        usage = {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": self._notes.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._notes.tokens,
        }
        ended = {"completed_at": int(time.time()), "usage": usage, "arimage": facts(result, self._notes)}
        return self._response("completed", [item]) | ended

    async def item(self, image: Image.Image) -> dict:
        """The item of the output."""
        shown = await self._shown(image)
        return {**self._call("completed"), "result": shown.pop("file"), **shown}

    async def stream(self, generation: Generation) -> AsyncIterator[str]:
        """Events: the response, its call, the partial images, and both again when they are complete."""
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=self._response("in_progress", []))
        yield self._event("response.output_item.added", output_index=0, item=self._call("in_progress"))
        for kind in ("in_progress", "generating"):
            yield self._event(f"response.image_generation_call.{kind}", output_index=0, item_id=self._item)
        index = 0
        async for preview in generation.previews():
            if preview is None:
                yield HEARTBEAT
                continue
            shown = await self._shown(preview)
            place = {"output_index": 0, "item_id": self._item, "partial_image_index": index}
            file = {"partial_image_b64": shown.pop("file")}
            yield self._event("response.image_generation_call.partial_image", **place, **file, **shown)
            index += 1
        result = generation.ticket.future.result(0)
        item = await self.item(result.images[0])
        yield self._event("response.image_generation_call.completed", output_index=0, item_id=self._item)
        yield self._event("response.output_item.done", output_index=0, item=item)
        yield self._event("response.completed", response=self.completed(item, result))

    def failed(self, error: dict) -> str:
        told = {"code": CODES.get(error["type"], "server_error"), "message": error["message"]}
        return self._event("response.failed", response=self._response("failed", []) | {"error": told})

    def _response(self, status: str, output: list[dict]) -> dict:
        return {**self._own, "status": status, "output": output, "error": None, "usage": None}

    def _call(self, status: str) -> dict:
        return {"id": self._item, "type": "image_generation_call", "status": status, "result": None}

    async def _shown(self, image: Image.Image) -> dict:
        """An image and what it is."""
        file = base64.b64encode(await run_in_threadpool(self._fields.encode, image)).decode()
        size, kind = f"{image.width}x{image.height}", self._fields.output_format or "png"
        return {"file": file, "size": size, "output_format": kind, "background": "opaque", "quality": "auto"}

    def _event(self, kind: str, **own: Any) -> str:
        self._events += 1
        return sse({"type": kind, "sequence_number": self._events - 1, **own}, kind)
