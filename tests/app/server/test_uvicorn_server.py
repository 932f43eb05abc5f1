"""The server with clients that are slow, silent or too many."""

import errno
import logging
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.server import uvicorn_server as connections
from arimage.app.server.app import build_server
from arimage.app.server.uvicorn_server import Server


@pytest.fixture(scope="module")
def engine():
    engine = Engine({"text": tiny_llamagen.text_pipeline()}, Limits(queue=4))
    yield engine
    engine.close()


@pytest.fixture
def server(engine, monkeypatch):
    """A running server for 4 + 4 connections, with one second for the head of a request."""
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Server(build_server(engine), engine, "127.0.0.1", port, log_level="warning")
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


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


def test_a_head_that_trickles_in_closes_the_connection(server):
    with connected(server, b"GET /health HTTP/1.1\r\n") as client:
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 10:
                client.sendall(b"X: y\r\n")
                time.sleep(0.1)


def test_a_body_that_nobody_reads_does_not_keep_the_connection(server):
    with connected(server, b"POST /none HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n") as client:
        assert client.recv(12) == b"HTTP/1.1 404"
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            while time.monotonic() - began < 10:
                client.sendall(b"x")
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
