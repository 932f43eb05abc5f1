"""What the routes of a server share, and what they depend on."""

import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from anyio import CapacityLimiter
from fastapi import Depends
from fastapi import Request as HTTPRequest
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from ..engine.engine import Engine
from ..engine.models import ModelInfo
from ..engine.types import Refused
from .backend import Backend
from .bodies import Bodies
from .errors import Problem, error_response
from .metrics import RequestMetrics
from .quotas import Quotas
from .video_jobs import VideoJobs


# Images whose URL was asked for: how many are stored, of how many bytes together, and for how many seconds.
KEPT, KEPT_BYTES, KEPT_SECONDS = 128, 2**28, 3600
# Requests whose images are decoded at a time: a photo of 50 million pixels with a mask takes 1 GB meanwhile.
DECODED = 2
# What a client of a draining server should wait for before it tries again, in seconds: another server, or a new one.
RETRY_SECONDS = 5


class KeptFiles:
    """Files in memory under random names: the newest `KEPT`, together of at most `KEPT_BYTES`, each for
    `KEPT_SECONDS`."""

    def __init__(self):
        self._files: OrderedDict[str, tuple[float, bytes, str]] = OrderedDict()
        self._bytes = 0

    def add(self, data: bytes, media_type: str) -> str:
        name = secrets.token_urlsafe(24)
        self._files[name] = (time.monotonic() + KEPT_SECONDS, data, media_type)
        self._bytes += len(data)
        while len(self._files) > 1 and self._has_surplus:
            _, (_, dropped, _) = self._files.popitem(last=False)
            self._bytes -= len(dropped)
        return name

    @property
    def _has_surplus(self) -> bool:
        expires = next(iter(self._files.values()))[0]
        return len(self._files) > KEPT or self._bytes > KEPT_BYTES or expires < time.monotonic()

    def get(self, name: str) -> tuple[bytes, str] | None:
        expires, data, media_type = self._files.get(name, (0.0, b"", ""))
        return (data, media_type) if expires > time.monotonic() else None


@dataclass
class About:
    """What a request is about, as far as it is known.

    Attributes:
        model: the model that generates its images.
    """

    model: str = ""


@dataclass(frozen=True)
class AdapterFolder:
    """Where the adapters are that requests may load, and the engine that loads them."""

    folder: Path
    engine: Engine


@dataclass
class ServerState:
    """What the routes share.

    Attributes:
        backend: generates the images.
        videos: generates the videos; None without video models.
        names: the model of each name that clients may use.
        adapters: loads adapters while the server runs; None if requests cannot ask for it.
        quotas: how much each client may ask for.
        tokens: those that open the server; empty lets everybody in.
        base_url: the public URL; None for the one that the client used.
        lenient: whether requests are answered that ask for something that the server or the model lacks.
        bodies: reads the bodies of requests.
        draining: whether only requests that have begun are finished.
        running: the number of requests for images that are being answered.
    """

    backend: Backend
    videos: VideoJobs | None
    names: Mapping[str, str]
    adapters: AdapterFolder | None
    quotas: Quotas
    tokens: tuple[str, ...]
    base_url: str | None
    lenient: bool
    bodies: Bodies
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    pictures: KeptFiles = field(default_factory=KeptFiles)
    decoders: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(DECODED))
    started: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    running: int = 0

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The abilities of all models, by name."""
        return self.backend.models | (self.videos.models if self.videos else {})

    @property
    def busy(self) -> bool:
        """Whether a draining server has something left to do."""
        return self.running > 0 or (self.videos is not None and self.videos.busy)

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True
        if self.videos is not None:
            self.videos.drain()

    def model_of(self, name: str | None, models: Mapping[str, ModelInfo]) -> str:
        """The one of `models` with this name or alias, by default the first.

        Raises:
            Refused: if there is none.
        """
        asked = next(iter(models), None) if name is None else self.names.get(name)
        if asked is not None and asked in models:
            return asked
        if self.lenient and models:
            return next(iter(models))
        if asked is not None:
            routes = "/v1/videos" if asked not in self.backend.models else "/v1/images/generations"
            raise Refused(f"{asked} does not generate this: send the request to {routes}", "model")
        known = [known for known, model in self.names.items() if model in models]
        if not known:
            raise Refused("this server generates videos only: send the request to /v1/videos", "model")
        raise Refused(f"unknown model {(name or '')[:80]!r}: choose among {', '.join(known)}", "model")

    def root_of(self, http: HTTPRequest) -> str:
        """The URL of this server, as its clients know it."""
        return (self.base_url or str(http.base_url)).rstrip("/")


def state_of(http: HTTPRequest) -> ServerState:
    """The state of the server that answers a request."""
    return http.app.state.server


State = Annotated[ServerState, Depends(state_of)]
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def authorised(http: HTTPRequest, state: State, credentials: Credentials) -> None:
    """Refuse a request without one of the tokens, and note who sends it for `client_of`."""
    given = "" if credentials is None else credentials.credentials
    # All are compared, so that the time tells nothing.
    matches = [hmac.compare_digest(given.encode(), token.encode()) for token in state.tokens]
    if state.tokens and not any(matches):
        message = "the bearer token is missing or wrong: send Authorization: Bearer TOKEN"
        headers = {"WWW-Authenticate": "Bearer"}
        raise Problem(error_response(message, 401, code="invalid_api_key", headers=headers))
    address = http.client.host if http.client else ""
    http.state.client = f"token {matches.index(True)}" if len(state.tokens) > 1 else address


def client_of(http: HTTPRequest) -> str:
    """Who sends a request that is `authorised`: its token if there are several, else its address."""
    return http.state.client


def accepting(http: HTTPRequest, state: State) -> None:
    """Refuse new work while the server drains, and from a client that has sent too many requests. For requests that
    are `authorised`."""
    if state.draining:
        message = "the server is closing and finishes what it has begun: try again later, or another server"
        raise Problem(error_response(message, 503, headers={"Retry-After": str(RETRY_SECONDS)}))
    state.quotas.count_request(client_of(http))
