"""The server with clients that are slow, silent or too many."""

import ast
import errno
import logging
import re
import socket
import threading
import time
import tomllib
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from app.server.server_kit import free_port, running, wait_for
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.server import connections, uvicorn_server


@pytest.fixture
def engine():
    return Engine({"text": tiny_llamagen.text_pipeline()}, Limits(queue=4))


@pytest.fixture
def server(engine, monkeypatch):
    """A running server for 4 + 4 connections, with one second for the head of a request."""
    monkeypatch.setattr(uvicorn_server, "SPARE_CONNECTIONS", 4)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 1)
    with running(engine) as (server, _):
        yield server


@pytest.fixture
def aborted(monkeypatch):
    """An event that is set when the server has aborted a connection."""
    event, abort = threading.Event(), connections.Connection.abort
    monkeypatch.setattr(connections.Connection, "abort", lambda self: (abort(self), event.set()))
    return event


@contextmanager
def connected(server, sent: bytes = b""):
    with socket.create_connection(("127.0.0.1", server.port)) as client:
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


def test_a_slow_answer_keeps_its_connection(server, engine, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(engine, "limits", Limits(gathering=0.6))
    url = f"http://127.0.0.1:{server.port}/v1/images/generations"
    with httpx.Client() as client:
        for _ in range(2):
            assert client.post(url, json={"prompt": "a"}, timeout=30).status_code == 200


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_reads_slowly_gets_its_whole_answer(server, monkeypatch, reads):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    size = 2**24
    name = server._state.pictures.add(bytes(size), "image/png")
    with connected(server, f"GET /pictures/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) as client:
        got = 0
        time.sleep(0 if reads else 0.8)
        try:
            while more := client.recv(2**18):
                got += len(more)
                time.sleep(0.02 if reads else 0)
        except ConnectionResetError:
            pass
    # It is closed when it waits for the next head, or when nothing is read.
    assert (got > size) == reads


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_does_not_read_does_not_hold_its_connection(engine, aborted, monkeypatch, reads):
    monkeypatch.setattr(connections, "READING_SECONDS", 0.3)
    count, size = 64, 2**18

    async def streaming(scope, receive, send):
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for number in range(count):
                await send({"type": "http.response.body", "body": bytes(size), "more_body": number < count - 1})

    server = uvicorn_server.Server(streaming, engine, "127.0.0.1", free_port(), log_level="critical")
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    with connected(server, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") as client:
        got = 0
        assert reads or aborted.wait(30)
        while reads and (more := client.recv(size)):
            got += len(more)
            time.sleep(0.01)
    server.stop()
    thread.join(30)
    engine.close()
    assert (got > count * size) == reads


def test_a_pipelined_request_does_not_undo_the_deadline_of_one_that_is_not_read(server, aborted, monkeypatch):
    monkeypatch.setattr(connections, "READING_SECONDS", 0.3)
    monkeypatch.setattr(connections, "HEAD_SECONDS", 60)
    name = server._state.pictures.add(bytes(2**24), "image/png")
    with connected(server, 2 * f"GET /pictures/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()):
        assert aborted.wait(30)


def test_answers_do_not_end_where_connections_are_unknown(server, engine, monkeypatch, caplog):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(connections.Connection, "data_received", lambda self, data: self._protocol.data_received(data))
    monkeypatch.setattr(engine, "limits", Limits(gathering=0.6))
    url = f"http://127.0.0.1:{server.port}/v1/images/generations"
    for _ in range(2):
        assert httpx.post(url, json={"prompt": "a"}, timeout=30).status_code == 200
    assert caplog.text.count("hides connections") == 1


def test_an_address_that_is_taken_meanwhile_ends_the_server(engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = uvicorn_server.Server(None, engine, *taken.getsockname(), log_level="critical")
        with pytest.raises(SystemExit):
            server.run()
    engine.close()


def test_silent_connections_leave_room(server):
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(server)) for _ in range(40)]
        began = time.monotonic()
        assert httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=10).status_code == 200
        # Before the silent connections ran out of time.
        assert time.monotonic() - began < 0.9
        assert len(server.connections.open) <= 8
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


# What the server uses of the libraries that it stands on, so that any version of them will do.

ROOT = Path(__file__).parents[3]
LIBRARIES = ("fastapi", "starlette", "uvicorn")
# uvicorn documents its Config and its Server; what the others document is in modules without an underscore.
UNDOCUMENTED = re.compile(r"uvicorn\.|(fastapi|starlette)(\.\w+)*\._")


def undocumented(source: str) -> list[str]:
    """The modules and names of `LIBRARIES` that a file imports although they are not documented, and its classes that
    derive from those of uvicorn."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ClassDef):
            names = [ast.unparse(base) for base in node.bases]
        else:
            continue
        found += [name for name in names if UNDOCUMENTED.match(name)]
    return found


def test_only_documented_parts_of_the_libraries_are_used():
    for file in (ROOT / "arimage").rglob("*.py"):
        assert not undocumented(file.read_text(encoding="utf-8")), file
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = [one for one in project["optional-dependencies"]["serve"] if one.startswith(LIBRARIES)]
    assert len(bounds) == len(LIBRARIES) and not any("<" in one or "==" in one for one in bounds)


@pytest.mark.parametrize(
    "source",
    [
        "from uvicorn.protocols.http.h11_impl import H11Protocol",
        "import uvicorn.server",
        "from starlette._utils import is_async_callable",
        "from fastapi.routing import _x",
        "class Server(uvicorn.Server): pass",
    ],
)
def test_undocumented_parts_are_found(source):
    assert undocumented(source)
