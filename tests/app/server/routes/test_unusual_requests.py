"""Requests that are valid but unusual, and the form of all answers: that of OpenAI's types."""

import asyncio
import base64
import io
import json

import httpx
import openai.types
import pytest
from app.server.server_kit import running, wait_for
from openai.types.video_delete_response import VideoDeleteResponse
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen
from pydantic import TypeAdapter, ValidationError
from starlette.testclient import TestClient

from arimage.app.engine.engine import Engine
from arimage.app.engine.videos import VideoMaker, VideoRequest
from arimage.app.server.app import build_server
from arimage.app.server.auth import OWN_PATHS
from arimage.app.server.routes.videos import Download
from arimage.app.server.video_jobs import Job
from arimage.media.files import can_write_mp4


HEADERS = [
    {"Content-Length": "abc"},
    {"Content-Length": "9" * 5000},
    {"Content-Type": "multipart/form-data; boundary=a; charset=nope"},
    {"Content-Type": "multipart/form-data"},
    {"Content-Type": ""},
    {"Host": "127.0.0.1:none"},
    {"Host": "[::1"},
    {"Origin": "null"},
    {"Origin": "http://[::1"},
    {"Range": "bytes=abc"},
    {"Range": "bytes=99999-"},
    {"If-Range": "W/x", "Range": "bytes=0-1"},
    {"Authorization": "Bearer"},
    {"Authorization": b"Bearer \xff\xfe"},
    {"Authorization": "Basic b25lOg=="},
    {"Authorization": "Bearer  one"},
    {"Authorization": "bearer   one "},
    {"Accept": "image/none", "Accept-Encoding": "*;q=0", "Expect": "100-continue"},
]
QUERIES = [
    "limit=0", "limit=1e3", "limit=" + "9" * 30, "limit=1&limit=2", "order=up", "variant=", "after=%00", "%ff=%ff",
]  # fmt: skip
ROUTES = [
    "GET /v1/models", "GET /v1/models/%00", "POST /v1/images/generations", "POST /v1/images/edits",
    "POST /v1/images/generations/", "GET /v1/images/edits", "GET /v1/videos", "POST /v1/videos", "GET /v1/videos/x",
    "GET /v1/videos/x/content", "DELETE /v1/videos/x", "PUT /v1/videos", "GET /pictures/x",
    "GET /pictures/%2e%2e%2fetc%2fpasswd", "POST /v1/images/variations", "POST /v1/chat/completions",
    "POST /v1/responses", "GET /v1/responses/x", "GET /docs", "GET /health", "GET /metrics",
]  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def maker():
    return VideoMaker({"film": tiny_cosmos.pipeline("text", begins_with_text=True)})


@pytest.fixture
def client(engine, maker):
    with TestClient(build_server(engine, videos=maker), base_url="http://127.0.0.1") as client:
        yield client


def check_form(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}, answer.text


@pytest.mark.parametrize(
    ("serves", "tokens"),
    [pytest.param("images", (), marks=pytest.mark.slow), ("videos", ("one",)), ("both", ("one", "two"))],
)
def test_unusual_requests_are_answered_in_the_form_of_openai(engine, maker, serves, tokens):
    app = build_server(
        Engine({}) if serves == "videos" else engine, videos=maker if serves != "images" else None, tokens=tokens
    )
    own = {"Authorization": f"Bearer {tokens[-1]}"} if tokens else {}
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for method, path in map(str.split, ROUTES):
            if path in ("/docs", "/v1/responses/x", "/pictures/%2e%2e%2fetc%2fpasswd"):
                assert client.request(method, path, headers=own).status_code == 404
            bodies = {} if method != "POST" else {"content": b'{"prompt": "a", "size": "9x9"}'}
            for headers in HEADERS:
                given = {"Content-Type": "application/json", **own, **headers}
                check_form(client.request(method, path, headers=given, **bodies))
            for query in QUERIES:
                check_form(client.request(method, f"{path}?{query}", headers=own, **bodies))


def test_a_server_says_which_kind_it_generates(engine, maker):
    with TestClient(build_server(Engine({}), videos=maker), base_url="http://127.0.0.1") as client:
        for body in ({"prompt": "a"}, {"prompt": "a", "model": "gpt-image-1"}):
            error = client.post("/v1/images/generations", json=body).json()["error"]
            assert "/v1/videos" in error["message"] and error["param"] == "model"
    with TestClient(build_server(engine), base_url="http://127.0.0.1") as client:
        error = client.post("/v1/videos", json={"prompt": "a"}).json()["error"]
        assert "/v1/images/generations" in error["message"] and error["param"] == "model"
        paths = client.get("/openapi.json").json()["paths"]
        assert "/v1/videos" not in paths and "422" not in paths["/v1/models/{name}"]["get"]["responses"]


def test_a_picture_as_a_text_is_its_url(client):
    for text, message in (
        ("https://a/b.png", "is not a data URL"),
        ("data:image/png;base64,R0lG", "read as an image"),
    ):
        for form in (
            {"json": {"prompt": "a", "input_reference": text}},
            {"files": {"prompt": (None, "a"), "input_reference": (None, text)}},
        ):
            error = client.post("/v1/videos", **form).json()["error"]
            assert message in error["message"] and error["param"] == "input_reference"


@pytest.mark.parametrize("value", [True, "2", 2.5])
@pytest.mark.parametrize("field", ["n", "seed", "top_k", "class_label"])
def test_numbers_of_json_are_numbers(client, field, value):
    answer = client.post("/v1/images/generations", json={"prompt": "a", field: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def check_type(name: str, body: dict, but: tuple[str, ...] = ()) -> None:
    """A body against a type of OpenAI's client, but for fields whose values it lists: sizes of its own models."""
    try:
        TypeAdapter(getattr(openai.types, name)).validate_python(body)
    except ValidationError as error:
        wrong = [one for one in error.errors() if one["loc"][0] not in but or one["type"] == "missing"]
        assert not wrong, wrong


@pytest.mark.parametrize(("path", "kind"), [("generations", "ImageGen"), ("edits", "ImageEdit")])
def test_events_and_answers_have_the_fields_of_openai(client, path, kind):
    picture = io.BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(picture, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}"
    body = {"prompt": "a", "images": [{"image_url": url}]} if path == "edits" else {"prompt": "a"}
    body |= {"background": "transparent", "quality": "high"}
    answer = client.post(f"/v1/images/{path}", json=body).json()
    check_type("ImagesResponse", answer)
    # The image is a whole rectangle, and the answer says so.
    assert answer["background"] == "opaque" and answer["arimage"]["ignored"] == ["background"]
    stream = client.post(f"/v1/images/{path}", json=body | {"stream": True, "partial_images": 2})
    assert stream.headers["cache-control"] == "no-cache" and stream.headers["x-accel-buffering"] == "no"
    events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: ")]
    assert len(events) == 3
    for event in events:
        check_type(f"{kind}{'Completed' if event['type'].endswith('completed') else 'PartialImage'}Event", event)
        assert event["background"] == "opaque"


@pytest.mark.skipif(not can_write_mp4(), reason="the extra `video` is not installed")
def test_videos_have_the_fields_of_openai(client):
    video = client.post("/v1/videos", json={"prompt": "a"}).json()
    check_type("Video", video, but=("size",))
    wait_for(lambda: client.get(f"/v1/videos/{video['id']}").json()["status"] == "completed")
    listed = client.get("/v1/videos").json()
    assert {"object", "data", "first_id", "last_id", "has_more"} == listed.keys()
    for one in (client.get(f"/v1/videos/{video['id']}").json(), *listed["data"]):
        check_type("Video", one, but=("size",))
    for model in client.get("/v1/models").json()["data"]:
        check_type("Model", model)
    folder = client.app.state.server.videos.get(video["id"]).files["video"].parent
    assert folder.is_dir()
    TypeAdapter(VideoDeleteResponse).validate_python(client.delete(f"/v1/videos/{video['id']}").json())
    wait_for(lambda: not folder.exists(), 10)


# Downloads


@pytest.mark.skipif(not can_write_mp4(), reason="the extra `video` is not installed")
def test_only_a_whole_download_counts(client):
    name = client.post("/v1/videos", json={"prompt": "a"}).json()["id"]
    wait_for(lambda: client.get(f"/v1/videos/{name}").json()["status"] == "completed")
    job, url = client.app.state.server.videos.get(name), f"/v1/videos/{name}/content"
    whole = job.files["video"].read_bytes()
    size = len(whole)
    assert client.head(url).headers["content-length"] == str(size)
    assert client.get(url, params={"variant": "thumbnail"}).status_code == 200
    for header, status, content in (
        ("bytes=0-1", 206, whole[:2]),
        ("bytes=-3", 206, whole[-3:]),
        (f"bytes={size}-", 416, None),
        ("bytes=0-1,4-5", 206, None),
    ):
        answer = client.get(url, headers={"Range": header})
        assert answer.status_code == status and (content is None or answer.content == content)
        assert not job.downloaded
    # Resumed where it was broken off.
    client.get(url, headers={"Range": f"bytes=0-{size // 2}"})
    assert not job.downloaded
    client.get(url, headers={"Range": f"bytes={size // 2}-"})
    assert job.downloaded
    job.fetched = 0
    assert client.get(url).content == whole and job.downloaded


def test_a_download_that_breaks_off_does_not_count(tmp_path):
    job = Job(VideoRequest("film", "a"), "one", (8, 8), 2, 8, status="completed")
    job.files = {"video": tmp_path / "video.mp4"}
    job.files["video"].write_bytes(bytes(10**6))
    sent = []

    async def receive():
        # The client hangs up while it reads.
        while len(sent) < 4:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)
        await asyncio.sleep(0)

    scope = {"type": "http", "method": "GET", "headers": [], "state": {"head": False}}
    asyncio.run(Download(job, "video")(scope, receive, send))
    assert len(sent) < 10 and not job.downloaded


# Operation


def test_a_root_path_is_not_one_of_the_server(client, engine):
    paths = {path.split("/")[1] for path in client.get("/openapi.json").json()["paths"]}
    assert paths | {"openapi.json"} == set(OWN_PATHS)
    for first in OWN_PATHS:
        for path in (f"/{first}", f"/{first}/images"):
            with pytest.raises(ValueError, match="--root-path"):
                build_server(engine, root_path=path)


def test_a_signal_while_it_closes_leaves_neither_a_traceback_nor_a_socket(maker, tmp_path, caplog):
    path = tmp_path / "socket"
    with running(Engine({}), videos=maker, uds=path) as (server, _):
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://127.0.0.1") as client:
            assert client.get("/health").status_code == 200
        for number in (15, 2, 15):
            server.on_signal(number)
    assert not path.exists() and "Traceback" not in caplog.text
