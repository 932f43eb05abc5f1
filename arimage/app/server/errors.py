"""Errors in the form of the OpenAI API."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from ..engine.types import Cancelled, Refused, Unavailable


# Fields of `Request` and `VideoRequest` that have other names in the API.
NAMES = {"count": "n", "mask_image": "mask", "num_frames": "seconds"}

logger = logging.getLogger(__name__)


class Problem(Exception):
    """Ends a request with a response."""

    def __init__(self, response: Response):
        super().__init__(response.status_code)
        self.response = response


def error_response(
    message: str,
    status: int,
    parameter: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error in the form of the OpenAI API."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": NAMES.get(parameter or "", parameter), "code": code}
    return JSONResponse({"error": error}, status, headers)


def failure(error: Exception) -> JSONResponse:
    """The answer to a request that `error` has ended."""
    match error:
        case Refused(busy=True):
            return error_response(str(error), 429, code="queue_full", headers={"Retry-After": "2"})
        case Refused(parameter="model"):
            return error_response(str(error), 404, "model", "model_not_found")
        case Refused():
            return error_response(str(error), 400, error.parameter)
        case Cancelled():
            return error_response("the server is closing: try again later", 503)
        case Unavailable():
            return error_response(str(error), 503)
        case _:
            return error_response("the image could not be generated: see the log of the server", 500)


def gone() -> Response:
    """Nobody reads this. nginx logs this status when a client has disconnected."""
    return Response(status_code=499)


async def answer_to(http: HTTPRequest, error: Exception) -> Response:
    """The response to a request that ended with an error."""
    match error:
        case Problem():
            return error.response
        case RequestValidationError():
            first = error.errors()[0]
            # Its place, as in "query", comes before its name.
            name = str(first["loc"][-1])
            return error_response(f"{name} is not valid: {first['msg']}", 400, name)
        case ValidationError():
            first = error.errors(include_url=False, include_input=False)[0]
            name = ".".join(map(str, first["loc"])) or None
            if first["type"] == "extra_forbidden":
                return error_response(f"unknown field {name!r}: leave it out", 400, name, "unknown_parameter")
            return error_response(f"{name or 'the body'} is not valid: {first['msg']}", 400, name)
        case ClientDisconnect():
            return gone()
        case HTTPException():
            message = f"{http.method} {http.url.path[:80]}: {error.detail}"
            return error_response(message, error.status_code, headers=error.headers)
        case _:
            return failure(error)


# For `FastAPI(exception_handlers=...)`.
OURS = [Problem, Refused, Cancelled, Unavailable]
HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    [*OURS, RequestValidationError, ValidationError, ClientDisconnect, HTTPException], answer_to
)
