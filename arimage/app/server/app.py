"""The server as an application: its routes, and what is around them."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from ..engine.engine import Engine
from .auth import check_addresses, local_only
from .backend import Backend, EngineBackend
from .bodies import Bodies
from .errors import HANDLERS
from .middleware import Failures, Watch
from .quotas import Quotas
from .routes import adapters, chat, images, pages, responses
from .routes import videos as video_routes
from .state import AdapterFolder, ServerState
from .video_jobs import VideoJobs, Videos


def build_server(
    engine: Engine | Backend,
    *,
    videos: Videos | None = None,
    tokens: Sequence[str] = (),
    base_url: str | None = None,
    root_path: str = "",
    host: str = "127.0.0.1",
    aliases: Mapping[str, str] | None = None,
    lenient: bool = False,
    allow_origin: Sequence[str] = (),
    lora_root: Path | None = None,
    quotas: Quotas | None = None,
) -> FastAPI:
    """The application: OpenAI's APIs of images, videos, chats and responses, a page about the server at /, /health,
    and /metrics for Prometheus. What its routes share is `app.state.server`.

    Args:
        engine: generates the images, an engine or the replicas of one; the caller closes it.
        videos: generates the videos.
        tokens: the bearer tokens that open the server, except for /health, /openapi.json and the URLs of images;
            without any, everybody may use it.
        base_url: the public URL of the server, with which the URLs of images begin; by default the one that the client
            used.
        root_path: the path under which a proxy shows the server, as in "/images", whether or not it removes it.
        host: the interface on which it listens. Without a token, a server on a loopback interface answers only
            requests to a loopback address or to `base_url`, and none from pages of other sites.
        aliases: other names for models, for clients that send fixed names.
        lenient: answer requests although they ask for something that the server or the model lacks; see
            `leniency`.
        lora_root: the folder of the adapters that requests may load; only for an engine in this process.
        quotas: how much each client may ask for; by default without limits.
        allow_origin: sites, as in "https://chat.example.org", whose pages may send requests.

    Raises:
        ValueError: if `base_url` does not begin with http:// or https://, or `root_path` or an origin has another
            form.
    """
    check_addresses(base_url, allow_origin, root_path)
    backend = EngineBackend(engine) if isinstance(engine, Engine) else engine
    # An image with its mask, and references, in base64.
    references = max((info.references for info in backend.models.values()), default=0)
    largest = (1 + references) * backend.limits.upload_bytes * 4 // 3 + 2**16
    jobs = None if videos is None else VideoJobs(videos)
    known = [*backend.models, *(jobs.models if jobs else [])]
    state = ServerState(
        backend=backend,
        videos=jobs,
        names={name: name for name in known} | dict(aliases or {}),
        tokens=tuple(tokens),
        adapters=AdapterFolder(lora_root, engine) if lora_root is not None and isinstance(engine, Engine) else None,
        quotas=quotas or Quotas(),
        base_url=base_url,
        lenient=lenient,
        bodies=Bodies(largest),
    )
    if jobs is not None:
        jobs.on_end = state.metrics.count_video
        state.metrics.watch_videos(lambda: jobs.unfinished)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if jobs is not None:
            await run_in_threadpool(jobs.close)

    middleware = [Middleware(Watch, state=state, root_path=root_path)]
    if allow_origin:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=allow_origin,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if not tokens:
        middleware += local_only(host, base_url, allow_origin)
    app = FastAPI(
        title="arimage",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=[*middleware, Middleware(Failures)],
        exception_handlers=HANDLERS,
        # In place of the 422 that FastAPI describes by default.
        responses={"4XX": {"description": "An error in the form of the OpenAI API"}},
    )
    app.state.server = state
    # Without models of videos these routes answer that there are none.
    app.include_router(video_routes.router, include_in_schema=jobs is not None)
    for router in (images.router, chat.router, responses.router, adapters.router, pages.public, pages.router):
        app.include_router(router)
    return app
