"""What a client of the demo that `arimage app` serves can reach, with and without a password."""

import asyncio
import inspect
import io
import json
import os
import re
import shutil
import tempfile
import tomllib
from pathlib import Path

import httpx
import pytest
import tiny
from packaging.requirements import Requirement
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen


pytest.importorskip("gradio")

import gradio as gr
import safehttpx
from app.demo.demo_kit import AUTH, call, file_data, served, visit
from gradio_client import Client

from arimage.app.demo import gate
from arimage.app.demo.demo import check_root_path, demo_app
from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.engine.videos import VideoMaker


SIZE = 4 * tiny.SCALE_FACTOR
MARK = "PRIVATE KEY 12345"


def tiny_engine() -> Engine:
    return Engine(
        {"text": tiny_llamagen.text_pipeline(), "class": tiny_llamagen.class_pipeline()}, Limits(prompt_characters=40)
    )


# A password changes who gets in and not what is open: long tests run without one.
ALIKE = pytest.mark.parametrize(
    "url", [None, pytest.param(AUTH, marks=pytest.mark.slow)], indirect=True, ids=["open", "password"], scope="module"
)


@pytest.fixture(scope="module", params=[None, AUTH], ids=["open", "password"])
def url(request):
    videos = VideoMaker({"video": tiny_cosmos.pipeline("text", begins_with_text=True)})
    with served(tiny_engine(), request.param, videos) as url:
        yield url, request.param


@pytest.fixture(scope="module")
def client(url):
    with visit(*url) as client:
        yield client


@pytest.fixture(scope="module")
def secrets():
    """Files with `MARK` in the home folder, in the working directory and in the folder for temporary files."""
    folders = [Path(tempfile.mkdtemp(dir=place)) for place in (Path.home(), Path.cwd(), None)]
    files = [folder / name for folder, name in zip(folders, ("id_rsa", ".env", "secret.png"), strict=True)]
    for file in files:
        file.write_text(MARK)
    yield files
    for folder in folders:
        shutil.rmtree(folder)


def upload(client, data: bytes, name: str = "a.png") -> httpx.Response:
    return client.post("/gradio_api/upload", files={"files": (name, data)})


def png(size: int = SIZE, colour: str = "white") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(file, "PNG")
    return file.getvalue()


def kept() -> list[Path]:
    """The files in the folder that Gradio serves."""
    return [path for path in Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*") if path.is_file()]


def assert_nothing_leaked(answer: str) -> None:
    assert MARK not in answer
    assert not [path for path in kept() if MARK.encode() in path.read_bytes()]


def shapes(file: dict) -> list:
    """A file in the values that components have, and deep in others."""
    return [
        file,
        [file],
        [{"image": file, "caption": None}],
        {"background": file, "layers": [file], "composite": file},
        {"value": [{"nested": file}]},
        {"path": 5, "meta": {}, "inner": file},
    ]


def functions(client) -> list[dict]:
    """The functions of the page and of the endpoints that take values."""
    return [one for one in client.get("/config").json()["dependencies"] if one["inputs"] and one["backend_fn"]]


@ALIKE
def test_no_input_of_any_function_takes_a_file_of_the_machine(client, secrets):
    found = functions(client)
    assert len(found) > 10
    for function in found:
        answers = []
        for place in range(len(function["inputs"])):
            for secret, value in zip(secrets * 2, shapes(file_data("")), strict=True):
                text = json.dumps(value).replace('"path": ""', f'"path": "{secret}"')
                data = [None] * len(function["inputs"])
                data[place] = json.loads(text)
                body = {"data": data, "fn_index": function["id"], "session_hash": "x"}
                answers.append(client.post("/gradio_api/run/predict", json=body).text)
        assert_nothing_leaked("".join(answers))


@ALIKE
def test_no_way_to_call_an_endpoint_takes_a_file_of_the_machine(client, secrets):
    for secret in [*secrets, "/etc/passwd"]:
        file = file_data(secret)
        values = {"prompt": file, "model": "text"}
        event = client.post("/gradio_api/call/v2/generate", json=values).json()["event_id"]
        answers = [client.get(f"/gradio_api/call/v2/generate/{event}").text]
        answers += [call(client, "generate", [file, "text", *[None] * 17]), call(client, "edit", [file, file, "a"])]
        for path in ("run/generate", "api/generate"):
            answer = client.post(f"/gradio_api/{path}", json={"data": [file, "text", *[None] * 17]})
            assert answer.status_code == 500 and "prompt is" in answer.json()["error"]
        edit = next(one["id"] for one in functions(client) if one["api_name"] == "edit")
        data = [file, file, "a", "text", None, None, 1, 0]
        body = {"data": data, "fn_index": edit, "session_hash": "one", "event_data": file, "trigger_id": None}
        assert client.post("/gradio_api/queue/join", json=body).status_code == 200
        with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "one"}) as events:
            lines = [line for line in events.iter_lines() if "process_completed" in line]
        assert "names a file that was not uploaded" in lines[0]
        answers += lines
        assert all("root:" not in answer for answer in answers)
        assert all("event: error" in answer for answer in answers[:3])
        assert_nothing_leaked("".join(answers))
        assert client.get(f"/gradio_api/file={secret}").status_code == 403


def test_an_upload_with_other_fields_is_only_the_upload(client, secrets):
    [path] = upload(client, png()).json()
    inner = file_data(secrets[0])
    file = file_data(path, url=f"file://{secrets[0]}", is_stream=True, orig_name=str(secrets[0]), inner=inner)
    events = call(client, "edit", [file, file, "a", "text", None, None, 1, 0])
    # The mask is white everywhere.
    assert "event: complete" in events
    assert_nothing_leaked(events)


def test_links_and_names_do_not_lead_out_of_the_folder(client, secrets):
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    (folder / "link.png").symlink_to(secrets[2])
    (folder / "all").symlink_to(Path.home())
    out = os.path.relpath(secrets[2], folder)
    for path in (folder / "link.png", folder / "all" / secrets[0].parent.name / "id_rsa", f"{folder}/{out}", out):
        events = call(client, "edit", [file_data(path), file_data(path), "a", "text", None, None, 1, 0])
        assert "names a file that was not uploaded" in events
        assert MARK not in client.get(f"/gradio_api/file={path}").text
    (folder / "link.png").unlink()
    (folder / "all").unlink()
    for path in ("a\0b", "", "/", "a" * 10_000, str(folder)):
        assert "names a file that was" in call(client, "edit", [file_data(path), None, "a", "text", None, None, 1, 0])
    for name in ("../../../evil.png", "/etc/evil.png", "..", "a/../../evil.png", "..\\evil.png", "x\0y.png"):
        answer = upload(client, png(), name)
        for path in answer.json() if answer.status_code == 200 else []:
            assert Path(path).resolve().is_relative_to(folder.resolve())
    assert not [path for path in (folder.parent / "evil.png", Path.cwd() / "evil.png") if path.exists()]


@ALIKE
def test_no_url_is_fetched(client, monkeypatch):
    fetched = []

    async def note(host, *arguments, **others):
        fetched.append(host)
        raise ValueError("not here")

    monkeypatch.setattr(safehttpx, "async_validate_url", note)
    monkeypatch.setattr(httpx.AsyncClient, "send", note)
    [path] = upload(client, png()).json()
    url = "http://example.org/a.png"
    for file in (file_data(url), file_data(path, url=url), file_data("", url=url), file_data("", url="data:,a")):
        for shape in shapes(file):
            call(client, "edit", [shape, shape, "a", "text", None, None, 1, 0])
            call(client, "generate", [shape, "text", *[None] * 10, shape, *[None] * 6])
    for route in ("file", "proxy"):
        for address in (url, "https://a.hf.space/a.png", "HTTP://example.org/a.png"):
            assert client.get(f"/gradio_api/{route}={address}").status_code in (403, 404)
    assert fetched == []


CLOSED = [
    "POST component_server", "GET deep_link?session_hash=x", "GET proxy=https://a.hf.space/", "POST stream/x",
    "GET stream/x/y/1/playlist-file", "POST process_recording", "GET custom_component/a/client/b/c",
    "GET file/etc/passwd", "GET dev/reload", "GET runs", "POST run-history/connect", "POST vibe-edit", "GET vibe-code",
    "GET profiling/traces", "GET mcp/sse", "GET ../monitoring", "GET ../monitoring/summary", "GET ../docs",
]  # fmt: skip


@pytest.mark.parametrize("request_", CLOSED)
def test_what_the_page_does_not_use_is_closed(client, request_):
    method, path = request_.split()
    assert client.request(method, f"/gradio_api/{path}").status_code == 404


def test_uploads_are_bounded(client, monkeypatch):
    monkeypatch.setattr(gate, "MAX_UPLOAD", 2**18)
    monkeypatch.setattr(gate, "MAX_KEPT", 2**20)
    noise = [os.urandom(2**16) for _ in range(40)]
    assert client.post("/gradio_api/upload", files=[("files", ("a.png", one)) for one in noise]).status_code == 413
    # Without a length, in pieces.
    head = {"Content-Type": "multipart/form-data; boundary=x"}
    part = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    pieces = iter([part, *noise, b"\r\n--x--\r\n"])
    try:
        assert client.post("/gradio_api/upload", content=pieces, headers=head).status_code == 413
    except httpx.HTTPError:
        # The server ends the connection while more is sent.
        pass
    paths = [upload(client, one).json()[0] for one in noise]
    assert sum(path.stat().st_size for path in kept()) <= 2**20
    assert Path(paths[-1]).exists() and not Path(paths[0]).exists()
    monkeypatch.setattr(gate, "MAX_KEPT", 2**16)
    answer = upload(client, noise[0])
    assert answer.status_code == 503 and "try again later" in answer.text


def test_results_make_room_at_the_next_request(tmp_path, monkeypatch):
    async def page(scope, receive, send):
        pass

    monkeypatch.setattr(gate, "MAX_KEPT", 250)
    files = [tmp_path / str(age) for age in range(4)]
    for age, path in enumerate(files):
        path.write_bytes(bytes(100))
        os.utime(path, (age, age))
    request = {"type": "http", "method": "POST", "path": "/gradio_api/queue/join"}
    asyncio.run(gate.Gate(page, tmp_path)(request, None, None))
    assert [path.exists() for path in files] == [False, False, True, True]


def test_bodies_are_bounded(client):
    text = "a" * gate.MAX_BODY
    assert client.post("/gradio_api/call/generate", json={"data": [text]}).status_code == 413
    nested = b'{"data": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    answer = client.post("/gradio_api/call/generate", content=nested, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)


def test_the_page_and_programs_use_a_local_demo(url, client):
    page = client.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"})
    assert page.status_code == 200 and "gradio" in page.text
    for headers in ({"Origin": url[0].rstrip("/"), "Sec-Fetch-Site": "same-origin"}, {}):
        answer = client.post("/gradio_api/call/v2/generate", json={"prompt": "a", "model": "text"}, headers=headers)
        events = client.get(f"/gradio_api/call/v2/generate/{answer.json()['event_id']}", headers=headers)
        assert "event: complete" in events.text


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 400),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 400),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
def test_pages_of_other_sites_cannot_use_or_read_the_demo(url, client, headers, status):
    for method, path in (("GET", "/"), ("GET", "/config"), ("POST", "/gradio_api/call/v2/generate")):
        response = client.request(method, path, headers=headers)
        assert "access-control-allow-origin" not in response.headers
        # With a password they lack its cookie.
        assert response.status_code == status or url[1] is not None


def test_a_proxy_shows_the_demo_at_another_address():
    with served(tiny_engine(), root_path="https://example.org/demo") as url, visit(url) as client:
        seen = {"Host": "example.org", "Origin": "https://example.org", "Sec-Fetch-Site": "same-origin"}
        assert client.get("/config", headers=seen).json()["root"] == "https://example.org/demo"
        body = {"data": ["a", "text", None, None, 1, 1, *[None] * 4, 0, *[None] * 8]}
        answer = client.post("/gradio_api/call/generate", json=body, headers=seen)
        assert answer.status_code == 200, answer.text
        events = client.get(f"/gradio_api/call/generate/{answer.json()['event_id']}", headers=seen).text
        assert '"url": "https://example.org/demo/gradio_api/file=' in events
        for headers in ({"Host": "evil.example"}, seen | {"Origin": "https://evil.example"}):
            assert client.post("/gradio_api/call/generate", json=body, headers=headers).status_code in (400, 403)


@pytest.mark.parametrize("root_path", ["demo", "example.org/demo", "ftp://example.org", "/demo/", "/a b", "/a?b"])
def test_an_address_of_another_form_is_refused(root_path):
    with pytest.raises(ValueError, match="--root-path"):
        check_root_path(root_path)
    for taken in (None, "/demo", "/a/b", "https://example.org", "http://localhost:80/demo"):
        check_root_path(taken)


def test_nobody_gets_in_without_the_password(url):
    url, auth = url
    if auth is None:
        pytest.skip("there is no password")
    with visit(url) as client:
        assert upload(client, png()).status_code == client.get("gradio_api/info").status_code == 401
    assert httpx.post(f"{url}gradio_api/call/generate", json={"data": ["a"]}).status_code == 401
    assert httpx.post(f"{url}login", data={"username": AUTH[0], "password": "sesame"}).status_code == 400
    with pytest.raises(Exception, match="[Ll]og|[Cc]redential|[Aa]uth"):
        Client(url, auth=(AUTH[0], "sesame"), verbose=False)


# What `gate.OPEN` opens of Gradio's addresses, and `Demo.preprocess_data` as the only way of a value to a function,
# were read in this version.
REVIEWED = {
    "/", "/config", "/config/", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json", "/login", "/login/",
    "/logout", "/static/{path}", "/assets/{path}", "/svelte/{path}",
}  # fmt: skip
REVIEWED_API = {
    "info", "info/", "openapi.json", "startup-events", "theme.css", "app_id", "app_id/", "user", "user/", "token",
    "token/", "login_check", "login_check/", "run/{api_name}", "run/{api_name}/", "api/{api_name}", "api/{api_name}/",
    "call/{api_name}", "call/{api_name}/", "call/v2/{api_name}", "call/v2/{api_name}/", "call/{api_name}/{event_id}",
    "call/v2/{api_name}/{event_id}", "queue/join", "queue/data", "queue/status", "cancel", "reset", "reset/",
    "heartbeat/{session_hash}", "upload", "upload_progress", "file={path_or_url}",
}  # fmt: skip


def test_gradio_is_the_version_that_was_read():
    engine = tiny_engine()
    [mounted] = [route for route in demo_app(engine, "127.0.0.1", 7860, None).routes if hasattr(route, "app")]
    engine.close()
    paths = {path for path in mounted.app.openapi()["paths"] if gate.OPEN.fullmatch(path)}
    # Before another version: read what it opens, and how values reach functions, then widen the range.
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [gradio] = project["optional-dependencies"]["app"]
    assert Requirement(gradio).specifier.contains(gr.__version__)
    assert not Requirement(gradio).specifier.contains("6.32.0")
    assert paths == REVIEWED | {f"/gradio_api/{path}" for path in REVIEWED_API}
    checks = "check_in_upload_folder=not explicit_call"
    assert checks in inspect.getsource(gr.Blocks.preprocess_data)
    assert inspect.getsource(gr.blocks).count(checks) == 1
    # For one call, and for each of a batch.
    calls = re.findall(r"await self\.preprocess_data\(", inspect.getsource(gr.Blocks.process_api))
    assert len(calls) == 2
