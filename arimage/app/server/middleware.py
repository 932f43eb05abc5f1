"""Checks the token and the size of every request to the server, and counts the requests for images."""

import hmac
import time

from starlette.responses import JSONResponse

from .metrics import RequestMetrics
from .schemas import error_response


# The paths of images begin with this.
PICTURES = "/pictures/"
COUNTED = ("/v1/images/generations", "/v1/images/edits")


class TooLarge(Exception):
    """The body of a request has too many bytes."""


class Gate:
    """ASGI middleware: checks the bearer token and the size of the body, and counts requests for images. A HEAD is
    answered as a GET, whose body the server that speaks HTTP leaves out.

    Args:
        token: the token that clients must send; None lets everybody in.
        max_body: bytes of the largest body.
    """

    def __init__(self, app, token: str | None, max_body: int, metrics: RequestMetrics):
        self.app, self.max_body, self.metrics = app, max_body, metrics
        self.expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, received, status = time.perf_counter(), 0, 500
        headers = dict(scope["headers"])

        async def bounded_receive():
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_body:
                raise TooLarge
            return message

        async def counted_send(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        answering = self.app
        is_open = scope["path"] == "/health" or scope["path"].startswith(PICTURES)
        authorised = (
            self.expected is None or is_open or hmac.compare_digest(headers.get(b"authorization", b""), self.expected)
        )
        if not authorised:
            answering = error_response(
                "the bearer token is missing or wrong: send Authorization: Bearer TOKEN",
                401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        elif int(headers.get(b"content-length", b"0")) > self.max_body:
            answering = too_large(self.max_body)
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await answering(asked, bounded_receive, counted_send)
        finally:
            if scope["path"] in COUNTED:
                self.metrics.requests.labels(status).inc()
                self.metrics.seconds.observe(time.perf_counter() - began)


def too_large(max_body: int) -> JSONResponse:
    return error_response(f"the body is larger than {max_body} bytes: send smaller images", 413)
