"""Runs an application with uvicorn, protected from slow, silent and too many clients."""

import asyncio
import errno
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Protocol

import uvicorn

from ..engine.types import Limits
from .connections import Connections


logger = logging.getLogger(__name__)

# Connections in addition to one per request in the engine's queue.
SPARE_CONNECTIONS = 128
# How long answers may take after the engine was closed, in seconds; an open page never stops listening.
CLOSING_SECONDS = 3
# Connections accepted at once, before those beyond the limit are closed: they need this many file descriptors more.
BACKLOG = 64
# How often the server looks for signals and for the end of what is drained, in seconds.
LOOKING_SECONDS = 0.1


# What the library logs, and uvicorn.
LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {name: {"handlers": ["stderr"]} for name in ("uvicorn", "arimage")},
}


class Closable(Protocol):
    """What a server stops when it is stopped, and what stops it: an engine, or the replicas of one."""

    limits: Limits
    on_failure: Callable[[], None] | None
    failure: BaseException | None

    def close(self) -> None: ...


class Drainable(Protocol):
    """What a server can finish before it ends, see `ServerState`."""

    draining: bool

    @property
    def busy(self) -> bool: ...

    def drain(self) -> None: ...


class Server:
    """A server for an engine. uvicorn runs in a thread of its own. The first SIGINT or SIGTERM lets the server drain:
    it refuses new requests, and ends when all others have ended, or `drain_seconds` later. A second signal closes the
    engine at once, which cancels all requests. When the engine fails, it stops.

    Args:
        state: what is drained; None ends with the first signal.
        drain_seconds: how long requests in progress may take after the first signal.
        uds: the path of a Unix socket to listen on, instead of `host` and `port`.
        certificate: the files of a TLS certificate and its key.

    Attributes:
        on_start: called when the server accepts connections.
        connections: its connections.
    """

    def __init__(
        self,
        app,
        engine: Closable,
        host: str,
        port: int,
        *,
        state: Drainable | None = None,
        drain_seconds: float = 30,
        uds: Path | None = None,
        certificate: tuple[str, str] | None = None,
        log_level: str = "info",
    ):
        certfile, keyfile = certificate or (None, None)
        # uvicorn's `limit_concurrency` ignores a connection until its head has arrived, and has no deadline for it.
        self.connections = Connections(engine.limits.queue + SPARE_CONNECTIONS)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.connections.watched(app),
                host=host,
                port=port,
                uds=None if uds is None else str(uds),
                # Only a proxy on this machine reaches a Unix socket.
                forwarded_allow_ips=None if uds is None else "*",
                ssl_certfile=certfile,
                ssl_keyfile=keyfile,
                log_config=LOG,
                log_level=log_level,
                # The application has its own, with the ids of requests.
                access_log=False,
                server_header=False,
                http="h11",
                ws="none",
                timeout_graceful_shutdown=CLOSING_SECONDS,
                backlog=BACKLOG,
            )
        )
        logging.getLogger("arimage").setLevel(log_level.upper())
        self.port = port
        self._engine, self._state, self._drain_seconds = engine, state, drain_seconds
        self._warned, self._signals, self._until = False, 0, 0.0
        self._socket = uds
        self.on_start: Callable[[], None] | None = None
        engine.on_failure = self.stop

    @property
    def started(self) -> bool:
        """Whether it accepts connections, or has."""
        return self._uvicorn.started

    @property
    def stopping(self) -> bool:
        """Whether it accepts no more connections."""
        return self._uvicorn.should_exit

    def run(self) -> None:
        """Serve until it is stopped."""
        announce = self.on_start
        with ThreadPoolExecutor(1, "arimage-server") as pool:
            serving = pool.submit(self._serve)
            while not serving.done():
                wait([serving], LOOKING_SECONDS)
                if self.started and announce is not None:
                    announce()
                    announce = None
                self._look()
        serving.result()

    def stop(self) -> None:
        """Accept no more connections, and end soon."""
        self._uvicorn.should_exit = True

    def on_signal(self, *_) -> None:
        """Note a signal."""
        # A handler may interrupt code that holds a lock: `_look` does the rest.
        self._signals += 1

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self.connections.loop) as runner:
                runner.get_loop().set_exception_handler(self._report)
                runner.run(self._uvicorn.serve())
        finally:
            if self._socket is not None:
                self._socket.unlink(missing_ok=True)

    def _look(self) -> None:
        """Do what the signals so far ask for."""
        state = self._state
        if not self._signals or self.stopping:
            return
        if state is None or self._signals > 1:
            self._close()
        elif not state.draining:
            self._until = time.monotonic() + self._drain_seconds
            state.drain()
        elif not state.busy:
            self._close()
        elif time.monotonic() > self._until:
            logger.warning("requests in progress after %g seconds are cancelled", self._drain_seconds)
            self._close()

    def _close(self) -> None:
        self.stop()
        self._engine.close()

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


def check_certificate(certfile: Path | None, keyfile: Path | None) -> tuple[str, str] | None:
    """The files of a TLS certificate and its key, if they are given.

    Raises:
        ValueError: if only one is, or they cannot be used together.
    """
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ValueError("--ssl-certfile and --ssl-keyfile belong together: give both")
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if not path.is_file():
            raise ValueError(f"{option} is {path}, which is not a file: give a file in PEM format")
    try:
        # A key with a password would ask for it.
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile, lambda: "")
    except OSError as error:
        raise ValueError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} cannot be used ({error}): give a certificate and "
            "its key in PEM format, without a password"
        ) from error
    return str(certfile), str(keyfile)


def check_socket(path: Path) -> None:
    """Refuse the path of a Unix socket that cannot be created. One that nobody listens on any more is removed.

    Raises:
        ValueError: naming --uds.
    """
    if path.exists() and not path.is_socket():
        raise ValueError(f"--uds is {path}, which is not a socket: give a path that is free")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if path.is_socket():
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink()
            else:
                raise ValueError(f"--uds is {path}, where another program listens: give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(str(path))
        except OSError as error:
            raise ValueError(f"--uds is {path}, which cannot be created ({error}): give another path") from error
        path.unlink()


def serve_until_stopped(server: Server, engine: Closable) -> None:
    """Serve until SIGINT or SIGTERM, then close the engine.

    Raises:
        RuntimeError: if the engine failed.
    """
    handlers = {}
    # Only the main thread gets signals.
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, server.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        engine.close()
    if engine.failure is not None:
        raise RuntimeError("the engine has failed: start again") from engine.failure
