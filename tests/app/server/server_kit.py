"""What the tests of the server share: a running server, and reading its images."""

import base64
import io
import os
import socket
import subprocess
import threading
import time
from contextlib import contextmanager

import httpx
import numpy as np
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from arimage.app.server.app import build_server
from arimage.app.server.uvicorn_server import Server


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def running(engine, **options):
    """A running `Server` and its URL. The options are those of `build_server` and of `Server`."""
    own = {name: options.pop(name) for name in ("uds", "certificate", "drain_seconds") if name in options}
    port, app = free_port(), build_server(engine, **options)
    options = {"state": app.state.server, "log_level": "warning", **own}
    server = Server(app, engine, "127.0.0.1", port, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    yield server, f"http{'s' if 'certificate' in own else ''}://127.0.0.1:{port}"
    engine.close()
    server.stop()
    thread.join(30)
    assert not thread.is_alive()


@contextmanager
def serving(engine, **options):
    """The URL of a running server."""
    with running(engine, **options) as (_, address):
        yield address


def wait_for(condition, seconds: float = 60, pause: float = 0.01) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(pause)


def picture(data: str | bytes) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data) if isinstance(data, str) else data))


def same(one: Image.Image, other: Image.Image) -> bool:
    """Whether images are equal, up to one level of 255: differently shaped matmuls round differently."""
    return np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1


def metric(address: str, name: str, headers: dict | None = None, **labels: str) -> float:
    """The sum of a metric over all values of the labels that are not given."""
    text = httpx.get(f"{address}/metrics", headers=headers).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(one.value for one in samples if one.name == name and labels.items() <= one.labels.items())


@contextmanager
def started(command: list[str]):
    """A process of the command, once it serves, and its address."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, **output)
    address = f"http://127.0.0.1:{command[command.index('--port') + 1]}"

    def healthy() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"{address}/health").status_code == 200
        except httpx.ConnectError:
            return False

    try:
        # Asking takes the CPU that it imports with.
        wait_for(healthy, 300, pause=0.2)
        yield process, address
    finally:
        process.kill()
