"""The server with clients that are slow, silent or too many."""

import errno
import logging
import socket
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from app.server.server_kit import running
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.server import uvicorn_server as connections


@pytest.fixture
def engine():
    return Engine({"text": tiny_llamagen.text_pipeline()}, Limits(queue=4))


@pytest.fixture
def server(engine, monkeypatch):
    """A running server for 4 + 4 connections, with one second for the head of a request."""
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1)
    with running(engine) as (server, _):
        yield server


@contextmanager
def connected(server, sent: bytes = b""):
    with socket.create_connection(("127.0.0.1", server.config.port)) as client:
        client.sendall(sent)
        client.settimeout(10)
        yield client


def is_closed(client: socket.socket) -> bool:
    """Whether the server closes a connection within ten seconds without an answer."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.every(2)
@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: "])
def test_a_head_that_does_not_arrive_closes_the_connection(server, sent):
    with connected(server, sent) as client:
        began = time.monotonic()
        assert is_closed(client) and 0.5 < time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("head", "answer", "more"),
    [
        (b"GET /health HTTP/1.1\r\n", b"", b"X: y\r\n"),
        (b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n", b"HTTP/1.1 404", b"x"),
    ],
)
def test_what_trickles_in_or_is_not_read_closes_the_connection(server, head, answer, more):
    with connected(server, head) as client:
        assert client.recv(len(answer)) == answer
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 10:
                client.sendall(more)
                time.sleep(0.1)


@pytest.mark.slow
def test_a_slow_answer_keeps_its_connection(server, engine, monkeypatch):
    monkeypatch.setattr(engine, "limits", Limits(gathering=2))
    url = f"http://127.0.0.1:{server.config.port}/v1/images/generations"
    assert httpx.post(url, json={"prompt": "a"}, timeout=30).status_code == 200


def test_silent_connections_leave_room(server):
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(server)) for _ in range(40)]
        began = time.monotonic()
        assert httpx.get(f"http://127.0.0.1:{server.config.port}/health", timeout=10).status_code == 200
        # Before the silent connections ran out of time.
        assert time.monotonic() - began < 0.9
        assert len(server.server_state.connections) <= 8
        # The oldest was closed.
        silent[0].settimeout(0.1)
        assert is_closed(silent[0])


def test_open_files_that_run_out_are_reported_once(server, caplog):
    context = {"message": "accept", "exception": OSError(errno.EMFILE, "Too many open files")}
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            server._report(None, context)
    assert [record.name for record in caplog.records] == ["arimage.app.server.uvicorn_server"]
    assert caplog.records[0].exc_info is None and "ulimit" in caplog.text
