"""How much each client may ask for: requests per minute, and images at a time."""

import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable

from ..engine.types import Refused
from .errors import Problem, error_response


WINDOW_SECONDS = 60


class Quotas:
    """What clients have asked for, and its limits.

    Args:
        requests: how many requests for images or videos a client may send per minute; None for any number.
        images: how many images of a client may wait or be generated at a time; None for any number.
    """

    def __init__(self, requests: int | None = None, images: int | None = None):
        self._requests, self._images = requests, images
        # When the requests of the last minute came, by client; the client whose last one came last is the last.
        self._times: OrderedDict[str, deque[float]] = OrderedDict()
        self._running, self._lock = Counter(), threading.Lock()

    def count_request(self, client: str) -> None:
        """Count a request.

        Raises:
            Problem: if the client has sent too many.
        """
        if self._requests is None:
            return
        with self._lock:
            now = time.monotonic()
            while self._times and next(iter(self._times.values()))[-1] < now - WINDOW_SECONDS:
                self._times.popitem(last=False)
            times = self._times.get(client, deque())
            while times and times[0] < now - WINDOW_SECONDS:
                times.popleft()
            if len(times) >= self._requests:
                seconds = math.ceil(times[0] + WINDOW_SECONDS - now)
                asked = f"{self._requests} requests per minute are allowed: try again in {seconds} seconds"
                raise _too_many(asked, seconds)
            times.append(now)
            self._times[client] = times
            self._times.move_to_end(client)

    def hold(self, client: str, images: int) -> Callable[[], None]:
        """Count images that a client asks for, until the function that is returned is called.

        Raises:
            Refused: if these alone are too many.
            Problem: if too many of its images wait or are being generated.
        """
        if self._images is not None and images > self._images:
            raise Refused(f"{images} images are asked for: ask for 1 to {self._images}", "count")
        with self._lock:
            found = self._running[client]
            if self._images is not None and found + images > self._images:
                asked = f"{self._images} images at a time are allowed, and {found} are not finished"
                raise _too_many(f"{asked}: try again later", 2)
            self._running[client] += images

        def release() -> None:
            with self._lock:
                self._running[client] -= images
                if not self._running[client]:
                    del self._running[client]

        return release


def _too_many(message: str, seconds: int) -> Problem:
    headers = {"Retry-After": str(seconds)}
    return Problem(error_response(message, 429, code="rate_limit_exceeded", headers=headers))
