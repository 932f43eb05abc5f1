"""Protects a server from slow, silent and too many connections. It relies on asyncio and ASGI alone, so it does not
depend on the library that speaks HTTP."""

import asyncio
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any


logger = logging.getLogger(__name__)

# How long the head of a request may take to arrive, and how long a client may leave an answer unread, in seconds.
HEAD_SECONDS, READING_SECONDS = 10, 120

# The connection whose data is being read. Tasks that start meanwhile, such as that of a request, inherit it.
_reading: ContextVar["Connection | None"] = ContextVar("arimage_connection", default=None)


class Connections:
    """The connections of a server.

    Args:
        most: how many there may be. A further one replaces the one whose deadline comes first; if all are being
            answered to clients that read, it is closed itself.

    Attributes:
        open: those that are open.
        known: whether requests could be told the connection that they came by. Otherwise no connection has a deadline:
            it would end answers.
    """

    def __init__(self, most: int):
        self.most, self.known = most, True
        self.open: set[Connection] = set()

    def loop(self) -> asyncio.AbstractEventLoop:
        """An event loop whose servers have these connections."""
        return _Loop(self)

    def watched(self, app: Callable) -> Callable:
        """An ASGI application that tells each connection when it is being answered."""

        async def watched_app(scope, receive, send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            connection = _reading.get()
            if connection is None:
                self._forget_deadlines()
                await app(scope, receive, send)
                return
            connection.begin()
            try:
                await app(scope, receive, send)
            finally:
                connection.end()

        return watched_app

    def _forget_deadlines(self) -> None:
        if self.known:
            logger.warning("this version of uvicorn hides connections: requests may take any time to arrive")
            self.known = False
        for connection in self.open:
            connection.stop()

    def admit(self, connection: "Connection") -> None:
        """Add a connection, and close one if there are too many."""
        self.open.add(connection)
        if len(self.open) > self.most:
            silent = {each: each.deadline for each in self.open if each.deadline is not None}
            dropped = min(silent, key=silent.__getitem__, default=connection)
            self.open.discard(dropped)
            dropped.abort()


class Connection(asyncio.Protocol):
    """A connection that is closed when the head of a request does not arrive in time, or when its client stops reading
    its answer. All else is up to the protocol that it stands in front of."""

    def __init__(self, connections: Connections, protocol: asyncio.Protocol):
        self._connections, self._protocol = connections, protocol
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._answering, self._paused, self._unsent = 0, False, 0

    @property
    def deadline(self) -> float | None:
        """When it is closed unless a head arrives or the client reads, in the time of the loop; None if it waits for
        neither."""
        return None if self._timer is None else self._timer.when()

    def begin(self) -> None:
        """Called when the head of a request has arrived."""
        self._answering += 1
        self._watch()

    def end(self) -> None:
        """Called when a request was answered."""
        self._answering -= 1
        self._watch()

    def abort(self) -> None:
        self._transport.abort()

    def connection_made(self, transport):
        self._transport = transport
        self._connections.admit(self)
        self._watch()
        self._protocol.connection_made(transport)

    def data_received(self, data):
        token = _reading.set(self)
        try:
            self._protocol.data_received(data)
        finally:
            _reading.reset(token)

    def eof_received(self):
        return self._protocol.eof_received()

    def pause_writing(self):
        # The client has to read first.
        self._paused = True
        self._watch()
        self._protocol.pause_writing()

    def resume_writing(self):
        self._paused = False
        self._watch()
        self._protocol.resume_writing()

    def connection_lost(self, exc):
        self.stop()
        self._connections.open.discard(self)
        self._protocol.connection_lost(exc)

    def _watch(self) -> None:
        """Wait for a head, or for a client that has to read. Nothing is waited for while an answer is generated."""
        self.stop()
        # It may have been lost while it was being answered.
        lost = self not in self._connections.open
        if lost or not self._connections.known or (self._answering and not self._paused):
            return
        self._unsent = self._transport.get_write_buffer_size()
        seconds = READING_SECONDS if self._answering else HEAD_SECONDS
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        # A client that still reads its answer may take longer.
        if self._transport.get_write_buffer_size() < self._unsent:
            self._watch()
        else:
            self.abort()

    def stop(self) -> None:
        """Forget the deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self, connections: Connections):
        super().__init__()
        self._connections = connections

    async def create_server(self, protocol_factory, *args, **options):
        return await super().create_server(self._guarded(protocol_factory), *args, **options)

    async def create_unix_server(self, protocol_factory, *args, **options):
        return await super().create_unix_server(self._guarded(protocol_factory), *args, **options)

    def _guarded(self, protocol_factory: Callable) -> Callable:
        return lambda: Connection(self._connections, protocol_factory())
