"""The route of OpenAI's Chat Completions API: the last message of the user is the prompt, and the answer an image."""

import base64
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends
from fastapi import Request as HTTPRequest
from pydantic import AliasPath, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from ...engine.types import Refused, Result
from ..bodies import MAX_FILES, Uploads
from ..errors import Problem, error_response
from ..state import ServerState, State, accepting, authorised
from .generating import HEARTBEAT, EventStream, Generation, files_of, prepared, sse, url_of
from .schemas import MEDIA_TYPES, EmbeddedImage, Fields, Notes, body_of, facts


# Fields that are about text. The settings of images are in `image_config`.
ABOUT_TEXT = frozenset({
    "audio", "frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens",
    "max_tokens", "metadata", "moderation", "parallel_tool_calls", "prediction", "presence_penalty",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "reasoning_effort", "response_format",
    "safety_identifier", "service_tier", "stop", "store", "temperature", "tool_choice", "tools", "top_logprobs",
    "top_p", "user", "verbosity", "web_search_options",
})  # fmt: skip
# Fields of images that the body itself has, and those that a chat does not.
ELSEWHERE = ("prompt", "model", "n", "stream", "partial_images")

router = APIRouter(prefix="/v1/chat/completions", dependencies=[Depends(authorised), Depends(accepting)])


class ChatMessage(BaseModel):
    """A message. Only the content of the last one of the user is read."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class ImagePart(BaseModel):
    type: Literal["image_url"]
    url: str = Field(validation_alias=AliasPath("image_url", "url"))


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="allow")

    include_usage: bool | None = None


CONTENT = TypeAdapter(list[Annotated[TextPart | ImagePart, Field(discriminator="type")]])


class Body(BaseModel):
    """What the bodies of chats and responses share."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    model: str | None = None
    stream: bool | None = None

    def read(self, lenient: bool) -> tuple[Fields, Uploads, list[str]]:
        """The fields of the images, the images of the last message, and the names of fields without effect.

        Raises:
            pydantic.ValidationError, Refused, Problem: if one is wrong.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Drop what was read and may be large, since a request may wait for long."""
        (self.model_extra or {}).clear()

    def ignored(self, known: frozenset[str], lenient: bool) -> list[str]:
        """The names of further fields that were sent, which have no effect.

        Raises:
            Problem: for one that is not `known`, unless the server is lenient.
        """
        sent = [name for name, value in (self.model_extra or {}).items() if value is not None]
        unknown = [name for name in sent if name not in known]
        if unknown and not lenient:
            message = f"unknown field {unknown[0]!r}: leave it out"
            raise Problem(error_response(message, 400, unknown[0], "unknown_parameter"))
        return sent


AnyBody = TypeVar("AnyBody", bound=Body)


async def begin(
    http: HTTPRequest, state: ServerState, kind: type[AnyBody]
) -> tuple[AnyBody, Fields, Notes, Generation]:
    """Read a request and submit it; see `Generation.begin`."""
    with state.bodies.counted(http):
        body = kind.model_validate_json(await state.bodies.read_json(http), strict=not state.lenient)
        fields, uploads, ignored = await run_in_threadpool(body.read, state.lenient)
        body.forget()
        request, notes = await prepared(http, state, fields, uploads)
        uploads.clear()
    notes.ignored = sorted([*notes.ignored, *ignored])
    return body, fields, notes, await Generation.begin(http, state, request, notes)


class ChatFields(Body):
    """The body of a request. `image_config` holds the fields of `Fields`; `modalities` with "image" asks for images
    next to the text."""

    messages: list[ChatMessage] = Field(min_length=1)
    n: int | None = None
    seed: int | None = None
    stream_options: StreamOptions | None = None
    modalities: list[str] | None = None
    image_config: dict[str, Any] | None = None

    def read(self, lenient: bool) -> tuple[Fields, Uploads, list[str]]:
        given = self.image_config or {}
        for name in ELSEWHERE:
            if name in given and not lenient:
                raise Refused(f"image_config has {name}, which is not for a chat: leave it out", "image_config")
        prompt, images = last_of("messages", self.messages, "text", CONTENT)
        settings = {name: value for name, value in given.items() if name not in ELSEWHERE}
        if self.seed is not None:
            settings["seed"] = self.seed
        own = {"prompt": prompt, "model": self.model, "n": self.n, "stream": self.stream}
        fields = Fields.read(settings | own, lenient)
        files = {"image": [image.read("messages") for image in images]} if images else {}
        return fields, files, self.ignored(ABOUT_TEXT, lenient)

    def forget(self) -> None:
        super().forget()
        self.messages, self.image_config = [], None


def last_of(field: str, messages: Sequence[Any], kind: str, parts: TypeAdapter) -> tuple[str, list[EmbeddedImage]]:
    """The prompt and the images of the last message of the user.

    Args:
        field: where the messages are.
        kind: the type of a part that is a text.
        parts: reads the parts of a message; those that are not texts have a `url`.

    Raises:
        Refused: if the user has sent no message, or the last one has other parts or too many images.
    """
    said = [message.content for message in messages if message.role == "user"]
    if not said:
        raise Refused("no message is from the user: send one with the prompt", field)
    content = [{"type": kind, "text": said[-1]}] if isinstance(said[-1], str) else said[-1]
    try:
        read = parts.validate_python(content)
    except ValidationError as error:
        message = "the last message of the user is neither a text nor a list of texts and images: send one of them"
        raise Refused(message, field) from error
    images = [EmbeddedImage(image_url=part.url) for part in read if part.type != kind]
    if len(images) > MAX_FILES:
        raise Refused(f"the message has more than {MAX_FILES} images: send fewer", field)
    return "\n".join(part.text for part in read if part.type == kind), images


@router.post("", openapi_extra=body_of(**{"application/json": ChatFields}))
async def completions(http: HTTPRequest, state: State) -> Response:
    """Generate images from the last message of the user, and from its images."""
    chat, fields, notes, generation = await begin(http, state, ChatFields)
    answers = Answers(http, state, chat, fields, notes)
    if fields.stream:
        return EventStream(generation, answers.stream(generation), lambda error: sse({"error": error}))
    return JSONResponse(await answers.whole(await generation.result(http)))


class Answers:
    """The answers to one request."""

    def __init__(self, http: HTTPRequest, state: ServerState, chat: ChatFields, fields: Fields, notes: Notes):
        self._http, self._state, self._chat, self._fields, self._notes = http, state, chat, fields, notes
        self._own = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time())}
        self._own["model"] = http.state.about.model

    async def whole(self, result: Result) -> dict:
        messages = [self._message(file) for file in await files_of(self._fields, result)]
        return {
            **self._own,
            "object": "chat.completion",
            "choices": [
                {
                    "index": index,
                    "message": {"role": "assistant", "refusal": None, **message},
                    "logprobs": None,
                    "finish_reason": "stop",
                }
                for index, message in enumerate(messages)
            ],
            "usage": self._usage,
            "arimage": facts(result, self._notes),
        }

    async def stream(self, generation: Generation) -> AsyncIterator[str]:
        """Chunks: the role, the image, the end and, if asked for, the usage."""
        yield self._chunk({"role": "assistant", "content": ""})
        async for _ in generation.previews():
            yield HEARTBEAT
        result = generation.ticket.future.result(0)
        [file] = await files_of(self._fields, result)
        yield self._chunk(self._message(file))
        yield self._chunk({}, "stop", arimage=facts(result, self._notes))
        if self._chat.stream_options and self._chat.stream_options.include_usage:
            yield sse({**self._own, "object": "chat.completion.chunk", "choices": [], "usage": self._usage})
        yield "data: [DONE]\n\n"

    def _chunk(self, delta: dict, finish_reason: str | None = None, **further: Any) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse({**self._own, "object": "chat.completion.chunk", "choices": [choice], **further})

    def _message(self, file: bytes) -> dict:
        """An image in a list of images for clients that say that they read one, else in the text as Markdown."""
        listed = "image" in (self._chat.modalities or [])
        # Programs refuse long addresses in Markdown.
        if (self._fields.response_format or ("b64_json" if listed else "url")) == "url":
            url = url_of(self._http, self._state, self._fields, file)
        else:
            kind = MEDIA_TYPES[self._fields.output_format or "png"]
            url = f"data:{kind};base64,{base64.b64encode(file).decode()}"
        if listed:
            return {"content": "", "images": [{"type": "image_url", "index": 0, "image_url": {"url": url}}]}
        return {"content": f"![image]({url})"}

    @property
    def _usage(self) -> dict:
        """Tokens of the prompt are not counted."""
        return {"prompt_tokens": 0, "completion_tokens": self._notes.tokens, "total_tokens": self._notes.tokens}
