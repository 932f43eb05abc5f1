"""Requests of several clients take turns before they go to replicas."""

import asyncio
import bisect
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ...engine.engine import MADE_ROOM
from ...engine.types import Cancelled, Refused, Request


@dataclass(eq=False)
class _Waiting:
    request: Request
    turn: int
    place: asyncio.Future


class Places:
    """Places that requests hold while they are generated. Clients get them in turn, image for image, as in `Engine`.

    Args:
        count: the number of places.
    """

    def __init__(self, count: int):
        self._free, self._turn = count, 0
        # In the order of their turns.
        self._waiting: list[_Waiting] = []

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, request: Request) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        waiting = _Waiting(request, self._turn_of(request), asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, waiting, key=lambda one: one.turn)
        self._admit()
        try:
            await waiting.place
            yield
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.place.cancelled() and waiting.place.exception() is None:
                self._free += 1
                self._admit()

    def make_room(self, request: Request) -> bool:
        """Refuse the last waiting request, unless `request` would come after it. Returns whether it did."""
        if not self._waiting or self._waiting[-1].turn <= self._turn_of(request):
            return False
        _end(self._waiting.pop(), Refused(MADE_ROOM, busy=True))
        return True

    def cancel(self) -> None:
        """Cancel the waiting requests. May be called in any thread."""
        for waiting in list(self._waiting):
            error = Cancelled("the request was cancelled")
            waiting.place.get_loop().call_soon_threadsafe(_end, waiting, error)

    def _turn_of(self, request: Request) -> int:
        own = [one for one in self._waiting if one.request.client == request.client]
        return max([self._turn, *(one.turn + one.request.count for one in own)])

    def _admit(self) -> None:
        while self._free and self._waiting:
            first = self._waiting.pop(0)
            if not first.place.done():
                self._free, self._turn = self._free - 1, max(self._turn, first.turn)
                first.place.set_result(None)


def _end(waiting: _Waiting, error: Exception) -> None:
    if not waiting.place.done():
        waiting.place.set_exception(error)
