"""The server with more clients than there is room for, and with clients that leave: its promises hold with an engine
in its own process and with replicas."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from app.server.serve_kit import BACKENDS, backend_of
from app.server.server_kit import metric, serving, wait_for
from pipelines.glm_image import tiny as tiny_glm_image

from arimage.app.engine.types import Limits
from arimage.app.server.replicas.replica import AHEAD
from arimage.app.server.routes import generating


QUEUE = 4


class Crowded:
    """A server whose images are generated one by one, and begin when `held.go` is set."""

    def __init__(self, kind, backend, engine, address):
        self.backend, self.engine, self.address = backend, engine, address
        # The requests that are not refused, and the metric of those that wait for the engine or a replica.
        self.places = QUEUE + (1 if kind == "engine" else AHEAD)
        self._waiting = "arimage_queue_length" if kind == "engine" else "arimage_unassigned_requests"
        self.client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60)

    @property
    def waiting(self) -> float:
        return metric(self.address, self._waiting)

    def fill(self, ask) -> list:
        """What `ask` returns for each request, when all places are taken."""
        asked = []
        for number in range(self.places):
            asked.append(ask())
            wait_for(lambda number=number: self.waiting == max(0, number + 1 - (self.places - QUEUE)))
            wait_for(lambda: self.engine.waiting + len(self.engine._running) > 0)
        return asked

    def send(self, stream: bool) -> socket.socket:
        """The connection of a request that nobody has answered."""
        body = json.dumps({"prompt": "a", "stream": stream, "partial_images": 1}).encode()
        head = "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection = socket.create_connection(("127.0.0.1", int(self.address.rpartition(":")[2])))
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return connection

    def is_idle(self) -> bool:
        return self.waiting == self.engine.waiting == 0 and all(each.future.done() for each in self.engine._running)


@pytest.fixture(params=BACKENDS)
def crowded(request, held):
    with (
        backend_of(request.param, {"text": held}, Limits(queue=QUEUE, batch=1)) as (backend, engine),
        serving(backend) as address,
    ):
        yield Crowded(request.param, backend, engine, address)
        held.go.set()


@pytest.mark.every(2)
def test_a_full_queue_answers_429(crowded, held):
    with ThreadPoolExecutor() as pool:
        asked = crowded.fill(lambda: pool.submit(crowded.client.images.generate, prompt="a"))
        with pytest.raises(openai.RateLimitError, match="4 requests") as raised:
            crowded.client.images.generate(prompt="a")
        assert raised.value.code == "queue_full" and raised.value.response.headers["retry-after"] == "2"
        held.go.set()
        assert all(answer.result(60).data for answer in asked)


@pytest.mark.every(2)
@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_free_their_places(crowded, held, stream):
    passes = []
    crowded.engine.on_pass = lambda model, images: passes.append(images)
    for connection in crowded.fill(lambda: crowded.send(stream)):
        connection.close()
    wait_for(crowded.is_idle)
    held.go.set()
    assert crowded.client.images.generate(prompt="b").model_extra["arimage"]["passes"] == 16
    # The image that had begun ended after its prefill.
    assert len(passes) <= 1 + 16


@pytest.mark.every(2)
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_it_is_accepted_holds_nothing(crowded, held, stream, monkeypatch):
    submit, entered, go = crowded.engine.submit, threading.Event(), threading.Event()

    def slow(*arguments):
        entered.set()
        assert go.wait(60)
        return submit(*arguments)

    monkeypatch.setattr(crowded.engine, "submit", slow)
    with crowded.send(stream):
        assert entered.wait(60)
    wait_for(lambda: metric(crowded.address, "arimage_requests_total", status="499") == 1)
    go.set()
    wait_for(lambda: held.entered.is_set() or not crowded.engine._waiting)
    wait_for(crowded.is_idle)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", BACKENDS)
def test_clients_that_leave_do_not_wait_for_the_decoder(kind):
    pipe = tiny_glm_image.pipeline()
    denoise, entered, go = pipe.denoise, threading.Event(), threading.Event()

    def held_denoise(*arguments):
        entered.set()
        assert go.wait(60)
        return denoise(*arguments)

    pipe.denoise = held_denoise
    limits = Limits(queue=QUEUE, batch=1)
    with backend_of(kind, {"glm": pipe}, limits) as (backend, engine), serving(backend) as address:
        crowded = Crowded(kind, backend, engine, address)
        # Nothing begins while an image waits for the decoder.
        connections = crowded.fill(lambda: crowded.send(False))
        assert entered.wait(60)
        assert httpx.post(f"{address}/v1/images/generations", json={"prompt": "a"}).status_code == 429
        for connection in connections:
            connection.close()
        wait_for(crowded.is_idle)
        go.set()
        assert crowded.client.images.generate(prompt="a").data


def test_a_client_that_leaves_before_its_stream_begins_holds_nothing(crowded, held, monkeypatch):
    unless_gone, accepted, go = generating._unless_gone, threading.Event(), threading.Event()

    async def slow(asked, http):
        result = await unless_gone(asked, http)
        accepted.set()
        await asyncio.to_thread(go.wait, 60)
        return result

    monkeypatch.setattr(generating, "_unless_gone", slow)
    with crowded.send(True):
        assert accepted.wait(60) and held.entered.wait(60)
    go.set()
    wait_for(crowded.is_idle)


def test_a_body_that_breaks_off_holds_nothing(crowded):
    port = int(crowded.address.rpartition(":")[2])
    for path in ("generations", "edits"):
        kind = "application/json" if path == "generations" else "multipart/form-data; boundary=x"
        head = f"POST /v1/images/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: 999"
        for _ in range(2 * crowded.places):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(f"{head}\r\n\r\n--x\r\n".encode())
    wait_for(lambda: metric(crowded.address, "arimage_requests_total", status="499") == 4 * crowded.places)
    assert crowded.is_idle()


def test_closing_ends_running_and_waiting_requests(crowded, held):
    with ThreadPoolExecutor() as pool:
        asked = crowded.fill(lambda: pool.submit(crowded.client.images.generate, prompt="a"))
        closing = threading.Thread(target=crowded.backend.close)
        closing.start()
        for answer in asked:
            with pytest.raises(openai.InternalServerError, match="the server is closing"):
                answer.result(60)
    held.go.set()
    closing.join(60)
    assert httpx.get(f"{crowded.address}/health").status_code == 503
    with pytest.raises(openai.InternalServerError, match="the server is closing"):
        crowded.client.images.generate(prompt="a")
