"""Runs an application with uvicorn, protected from slow, silent and too many clients."""

import asyncio
import errno
import logging
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..engine.types import Limits


logger = logging.getLogger(__name__)

# How long the head of a request may take to arrive, in seconds.
HEAD_SECONDS = 10
# Connections in addition to one per request in the engine's queue.
SPARE_CONNECTIONS = 128
# How long answers may take after the engine was closed, in seconds; an open page never stops listening.
CLOSING_SECONDS = 3
# Connections accepted at once, before those beyond the limit are closed: they need this many file descriptors more.
BACKLOG = 64


class Closable(Protocol):
    """What a server stops when it is stopped, and what stops it: an engine, or the replicas of one."""

    limits: Limits
    on_failure: Callable[[], None] | None
    failure: BaseException | None

    def close(self) -> None: ...


class Connection(H11Protocol):
    """An HTTP connection that is closed when the head of a request does not arrive in time. Beyond `most` connections,
    a new one replaces the one that has waited longest for a head; if all are being answered, the new one is closed.

    uvicorn's own `limit_concurrency` ignores a connection until its head has arrived.
    """

    def __init__(self, most: int, **arguments):
        super().__init__(**arguments)
        self._most = most
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport):
        super().connection_made(transport)
        if len(self.connections) > self._most:
            deadlines = {
                other: other._deadline.when()
                for other in self.connections
                if isinstance(other, Connection) and other._deadline is not None
            }
            dropped = min(deadlines, key=deadlines.__getitem__, default=self)
            self.connections.discard(dropped)
            dropped.transport.abort()
        self._watch()

    def data_received(self, data):
        super().data_received(data)
        self._watch()

    def on_response_complete(self):
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc):
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        """Start the timer for the next head after the last request was answered; stop it when the head is there."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_watching()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Server(uvicorn.Server):
    """A server for an engine. When it is stopped it closes the engine, which cancels all requests. When the engine
    fails, it stops.

    Attributes:
        on_start: called when the server accepts connections.
    """

    def __init__(self, app, engine: Closable, host: str, port: int, log_level: str = "info"):
        protocol = partial(Connection, engine.limits.queue + SPARE_CONNECTIONS)
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_level=log_level,
                server_header=False,
                # uvicorn only calls this.
                http=protocol,  # pyright: ignore[reportArgumentType]
                ws="none",
                timeout_graceful_shutdown=CLOSING_SECONDS,
                backlog=BACKLOG,
            )
        )
        self._engine, self._warned = engine, False
        self.on_start: Callable[[], None] | None = None
        engine.on_failure = self._stop

    async def startup(self, sockets=None):
        asyncio.get_running_loop().set_exception_handler(self._report)
        await super().startup(sockets)
        if self.started and self.on_start is not None:
            self.on_start()

    def handle_exit(self, sig: int, frame) -> None:
        self.force_exit = self.should_exit
        self._stop()
        # Closing waits for the running step; a signal handler must not wait.
        threading.Thread(target=self._engine.close).start()

    def _stop(self) -> None:
        self.should_exit = True

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """Log an error of the event loop, but only once that too many files are open: every connection repeats it."""
        if getattr(context.get("exception"), "errno", None) not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif not self._warned:
            self._warned = True
            logger.error("too many open files for another connection: raise the limit (ulimit -n) or lower --queue")


def check_free(host: str, port: int) -> None:
    """Refuse an address on which this machine cannot serve, before a model is loaded for it.

    Raises:
        ValueError: naming --host or --port.
    """
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host} is not an address: give 127.0.0.1, or 0.0.0.0 for other machines") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As the server does: a port whose connections have just ended is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                message = f"--host {host} is not an address of this machine: give 127.0.0.1 or 0.0.0.0"
            elif error.errno == errno.EADDRINUSE:
                message = f"--port {port} is taken by another program: give another --port"
            else:
                message = f"--port {port} cannot be used ({error.strerror}): give a --port above 1023"
            raise ValueError(message) from error


def serve_until_stopped(server: Server, engine: Closable) -> None:
    """Serve until SIGINT or SIGTERM, then close the engine.

    Raises:
        RuntimeError: if the engine failed.
    """
    try:
        server.run()
    finally:
        engine.close()
    if engine.failure is not None:
        raise RuntimeError("the engine has failed: start again") from engine.failure
