"""What is around the routes: each request gets an id, a line in the log, metrics if it is for images, and an answer
even if its route fails."""

import logging
import re
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders

from .errors import failure
from .state import About, ServerState


# The paths of images begin with this.
PICTURES = "/pictures/"
COUNTED = (
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/chat/completions",
    "/v1/responses",
)

logger, access = logging.getLogger(__name__), logging.getLogger("arimage.access")


class Watch:
    """ASGI middleware around all others. Every response has an `x-request-id`, the client's if it is short and plain.
    A HEAD is answered as a GET, whose body the server that speaks HTTP leaves out; `state.head` of a request tells.
    Routes note in `state.about` of a request what it is about.

    Args:
        root_path: the path under which a proxy shows the server, whether or not it has removed it.
    """

    def __init__(self, app, state: ServerState, root_path: str = ""):
        self.app, self.state, self.root_path = app, state, root_path

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, state = time.perf_counter(), 500, self.state
        path = scope["path"].removeprefix(self.root_path)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if re.fullmatch(r"[\w.:-]{1,64}", given, re.ASCII) else uuid.uuid4().hex
        counted, about = path in COUNTED, About()

        async def watched_send(message):
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                # The next request should go to another server.
                if state.draining:
                    headers["connection"] = "close"
            await send(message)

        # What a draining server refuses does not keep it from ending.
        begun = counted and not state.draining
        state.running += begun
        try:
            head = scope["method"] == "HEAD"
            asked = {
                **scope,
                "method": "GET" if head else scope["method"],
                "root_path": self.root_path,
                "state": {**scope.get("state", {}), "head": head, "about": about},
            }
            await self.app(asked, receive, watched_send)
        finally:
            state.running -= begun
            seconds = time.perf_counter() - began
            if counted:
                state.metrics.requests.labels(status, about.model).inc()
                state.metrics.seconds.labels(about.model).observe(seconds)
            # Anyone who knows the path of an image can see it.
            shown = PICTURES + "..." if path.startswith(PICTURES) else quote(path)
            client = scope["client"][0] if scope.get("client") else "local"
            access.info('%s "%s %s" %d %.3fs %s', client, scope["method"], shown, status, seconds, request_id)


class Failures:
    """ASGI middleware within all others, so that the answer to a request whose route has failed passes through them,
    unlike that of Starlette's handler of all exceptions."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        began = False

        async def noted_send(message):
            nonlocal began
            began = True
            await send(message)

        try:
            await self.app(scope, receive, noted_send)
        except Exception as error:
            if scope["type"] != "http" or began:
                raise
            logger.exception("%s %s failed", scope["method"], quote(scope["path"]))
            await failure(error)(scope, receive, send)
