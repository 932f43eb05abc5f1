"""Starts the server."""

import logging

from ..engine.engine import Engine
from .app import build_server
from .middleware import PICTURES
from .replicas import Replicas
from .uvicorn_server import Server, serve_until_stopped


def serve_forever(engine: Engine | Replicas, host: str, port: int, **options) -> None:
    """Serve until SIGINT or SIGTERM, then close the engine, which cancels the remaining requests. `options` are those
    of `build_server`.

    Raises:
        RuntimeError: if the engine failed.
    """
    app = build_server(engine, host=host, **options)
    server = Server(app, engine, host, port)
    logging.getLogger("uvicorn.access").addFilter(hide_images)
    serve_until_stopped(server, engine)


def hide_images(record: logging.LogRecord) -> bool:
    """Keep the paths of images out of uvicorn's log: anyone who knows the path of an image can see it."""
    client, method, path, *rest = record.args  # pyright: ignore[reportGeneralTypeIssues] uvicorn gives all of these
    if str(path).startswith(PICTURES):
        record.args = (client, method, PICTURES + "...", *rest)
    return True
