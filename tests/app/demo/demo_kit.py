"""The demo as `arimage app` serves it, over a socket."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from arimage.app.demo.demo import serve_demo
from arimage.app.engine.engine import Engine
from arimage.app.engine.videos import VideoMaker


AUTH = ("ada", "opens sesame")


@contextmanager
def served(
    engine: Engine,
    auth: tuple[str, str] | None = None,
    videos: VideoMaker | None = None,
    host: str = "127.0.0.1",
    root_path: str | None = None,
) -> Iterator[str]:
    """The URL of the demo. The engine is closed with it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The command sets it for good.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", "")
        thread = threading.Thread(target=serve_demo, args=(engine, host, port, auth, videos, root_path))
        thread.start()
        url = f"http://127.0.0.1:{port}/"
        try:
            wait_until_served(thread, url)
            yield url
        finally:
            # As when the engine fails, without a signal to the tests.
            assert engine.on_failure is not None
            engine.on_failure()
            thread.join()


def wait_until_served(thread: threading.Thread, url: str) -> None:
    until = time.monotonic() + 60
    while True:
        assert thread.is_alive() and time.monotonic() < until
        try:
            httpx.get(f"{url}robots.txt")
            return
        except httpx.ConnectError:
            time.sleep(0.05)


@contextmanager
def visit(url: str, auth: tuple[str, str] | None = None) -> Iterator[httpx.Client]:
    """A client of the demo, logged in if there is a password."""
    with httpx.Client(base_url=url, timeout=60) as client:
        if auth is not None:
            assert client.post("/login", data={"username": auth[0], "password": auth[1]}).status_code == 200
        yield client


def call(client: httpx.Client, name: str, data: list) -> str:
    """The events of a call of an endpoint."""
    answer = client.post(f"/gradio_api/call/{name}", json={"data": data})
    assert answer.status_code == 200, answer.text
    return client.get(f"/gradio_api/call/{name}/{answer.json()['event_id']}").text


def file_data(path: str | Path, **fields) -> dict:
    """A file as Gradio's clients name it."""
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}, **fields}
