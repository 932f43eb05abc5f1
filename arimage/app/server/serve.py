"""Starts the server."""

from ..engine.engine import Engine
from ..engine.videos import VideoMaker
from .app import build_server
from .replicas import Replicas
from .uvicorn_server import Server, serve_until_stopped


def serve_forever(
    engine: Engine | Replicas,
    host: str,
    port: int,
    *,
    videos: VideoMaker | None = None,
    drain_seconds: float = 30,
    uds: str | None = None,
    certificate: tuple[str, str] | None = None,
    log_level: str = "info",
    **options,
) -> None:
    """Serve until SIGINT or SIGTERM, finish the requests in progress, and close the engine; see `Server`. `options`
    are those of `build_server`.

    Raises:
        RuntimeError: if the engine failed.
    """
    app = build_server(engine, videos=videos, host=host, **options)
    server = Server(
        app,
        engine,
        host,
        port,
        state=app.state.server,
        drain_seconds=drain_seconds,
        uds=uds,
        certificate=certificate,
        log_level=log_level,
    )
    serve_until_stopped(server, engine)
