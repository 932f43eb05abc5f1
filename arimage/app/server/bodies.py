"""Reads the bodies of requests, with limits on their size, their duration, and the memory of all of them."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from fastapi import Request as HTTPRequest
from python_multipart import create_form_parser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import Field, File
from starlette.types import Message

from ..engine.types import Refused
from .errors import Problem, error_response


# How long the body of a request may take to arrive, in seconds.
BODY_SECONDS = 30
# Bytes of all bodies that are being received or decoded.
MAX_BODIES = 2**29
# Files of a form or of JSON, and texts of a form. Some more files are read than any model takes, so that the error can
# say how many it takes.
MAX_FILES, MAX_FIELDS = 16, 64

# The files of a request, by field.
Uploads = dict[str, list[bytes]]


class Bodies:
    """Reads bodies of at most `largest` bytes, and at most `MAX_BODIES` of them together.

    Attributes:
        held: bytes of the bodies that are being received or decoded.
    """

    def __init__(self, largest: int):
        self.largest, self.held = largest, 0

    @contextmanager
    def counted(self, http: HTTPRequest) -> Iterator[None]:
        """Count the body of a request as held while it is read here and decoded."""
        http.state.received = 0
        try:
            yield
        finally:
            self.held -= http.state.received

    async def read_json(self, http: HTTPRequest) -> bytes:
        """A body of JSON as it was sent.

        Raises:
            Problem: if it is of another type, too large or too slow.
            Refused: if there are too many at a time.
        """
        if media_type(http) != "application/json":
            raise Problem(error_response("the body is not JSON: send Content-Type: application/json", 415))
        async with _in_time():
            return await self._bounded(http).body()

    async def read_form(self, http: HTTPRequest) -> tuple[dict[str, str], Uploads]:
        """The texts and files of multipart/form-data by field. Files stay in memory. `name[]`, `name[0]`, `name[1]`
        and so on are the files of `name`: first those with numbers.

        Raises:
            Problem: if the body is too large or too slow.
            Refused: if it is not a form, has too many parts, or a text is sent several times, or there are too many
                bodies at a time.
        """
        texts: dict[str, str] = {}
        numbered: dict[str, list[tuple[int, bytes]]] = {}

        def on_field(field: Field) -> None:
            name, value = ((part or b"").decode(errors="replace") for part in (field.field_name, field.value))
            if name in texts:
                raise Refused(f"the field {name} is sent several times: send it once", name)
            if len(texts) == MAX_FIELDS:
                raise Refused(f"the form has more than {MAX_FIELDS} fields: send fewer")
            texts[name] = value

        def on_file(file: File) -> None:
            if sum(map(len, numbered.values())) == MAX_FILES:
                raise Refused(f"the form has more than {MAX_FILES} files: send fewer")
            name = (file.field_name or b"").decode(errors="replace")
            field, number = re.fullmatch(r"(.*?)(?:\[(\d{0,4})\])?", name, re.DOTALL).groups()  # pyright: ignore[reportOptionalMemberAccess]
            file.file_object.seek(0)
            place = int(number) if number else MAX_FILES
            numbered.setdefault(field, []).append((place, file.file_object.read()))

        try:
            headers = {"Content-Type": http.headers["content-type"].encode("latin-1")}
            config = {"MAX_MEMORY_FILE_SIZE": self.largest + 1}
            parser = create_form_parser(headers, on_field, on_file, config=config)
            async with _in_time():
                async for chunk in self._bounded(http).stream():
                    parser.write(chunk)
            parser.finalize()
        except FormParserError as error:
            raise Refused(f"the form cannot be read: {error}") from error
        files = {name: [data for _, data in sorted(found, key=lambda one: one[0])] for name, found in numbered.items()}
        return texts, files

    def _bounded(self, http: HTTPRequest) -> HTTPRequest:
        """The request with a body within the limits."""
        too_large = Problem(error_response(f"the body is larger than {self.largest} bytes: send smaller images", 413))
        # What is sent decides: this only saves reading it.
        length = http.headers.get("content-length", "")
        if re.fullmatch(r"[0-9]{1,20}", length) and int(length) > self.largest:
            raise too_large

        async def receive() -> Message:
            message = await http.receive()
            size = len(message.get("body", b""))
            http.state.received += size
            self.held += size
            if http.state.received > self.largest:
                raise too_large
            # One alone is read in any case.
            if MAX_BODIES < self.held > http.state.received:
                raise Refused("many large requests are being received: try again later", busy=True)
            return message

        return HTTPRequest(http.scope, receive)


def media_type(http: HTTPRequest) -> str:
    """The media type of a body, without parameters."""
    return http.headers.get("content-type", "").partition(";")[0].strip().lower()


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(BODY_SECONDS):
            yield
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_SECONDS} seconds: send it faster"
        raise Problem(error_response(message, 408)) from error
