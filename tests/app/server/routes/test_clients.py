"""Requests as programs send them, replayed: the bodies are those in their source code or documentation in 2025 and
2026. The programs themselves were not run, apart from OpenAI's client (openai-python 3.57)."""

import base64
import io

import openai
import pytest
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.llamagen import tiny as tiny_llamagen
from starlette.testclient import TestClient

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.engine.videos import VideoMaker
from arimage.app.server.app import build_server
from arimage.media.files import can_write_mp4


@pytest.fixture(scope="module")
def engine():
    engine = Engine({"text": tiny_llamagen.text_pipeline(), "other": tiny_llamagen.text_pipeline()}, Limits(images=2))
    yield engine
    engine.close()


@pytest.fixture
def client(engine):
    """A function from options of the server to a client of it."""
    return lambda **options: TestClient(build_server(engine, **options), base_url="http://127.0.0.1")


LENIENT = {"lenient": True}
LONG = "A red heart on a wooden table, " * 30

IN_JSON = {"response_format": "b64_json"}
# (program, its request, the fields that have no effect)
GENERATIONS = [
    ("Open WebUI", {"model": "dall-e-2", "prompt": LONG, "n": 1, "size": "512x512", **IN_JSON}, []),
    ("Open WebUI, gpt-image", {"model": "gpt-image-1.5", "prompt": "a red heart", "n": 1, "size": "512x512"}, []),
    (
        "LibreChat",
        {"model": "gpt-image-2.5-flare", "prompt": LONG, "n": 10, "size": "1536x1024", "output_format": "png"}
        | {"background": "auto", "quality": "auto"},
        ["n"],
    ),
    (
        "n8n",
        {"prompt": "a", "model": "dall-e-3", "size": "1792x1024", "quality": "hd", "style": "vivid", **IN_JSON},
        [],
    ),
    ("litellm", {"model": "text", "prompt": "a", "n": 1, "user": "u", "metadata": {"trace_id": "1"}}, ["metadata"]),
    # createImage.ts of 3c7f186: what its models let users set, through OpenAI's client.
    ("LobeChat", {"model": "gpt-image-1", "n": 1, "prompt": LONG, "size": "1024x1536", "quality": "high"}, []),
    (
        "LobeChat, dall-e-3",
        {"model": "dall-e-3", "n": 1, "prompt": LONG, "seed": 7, "steps": 20, "cfg": 4, **IN_JSON},
        ["cfg", "steps"],
    ),
    ("llama-swap", {"model": "sd-turbo", "prompt": "a red heart", "size": "512x512"}, []),
    (
        "LocalAI",
        {"prompt": "a red heart", "size": "256x256", "step": 15, "mode": 0, "negative_prompt": "blue"},
        ["mode", "negative_prompt", "step"],
    ),
]
EDITS = [
    ("Open WebUI", {"model": "gpt-image-1", "prompt": LONG, "n": "1", "size": "512x512"}, "image", []),
    ("LibreChat", {"model": "gpt-image-1", "prompt": LONG, "quality": "auto", "size": "auto"}, "image[]", []),
    ("LobeChat", {"model": "gpt-image-1", "prompt": LONG, "n": "1", "input_fidelity": "high"}, "image", []),
    ("with a field of its own", {"prompt": "a", "strength": "0.7"}, "image", ["strength"]),
]


def png(colour: str) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (8, 8), colour).save(data, "PNG")
    return data.getvalue()


@pytest.mark.every(3)
@pytest.mark.parametrize(("body", "ignored"), [pytest.param(*rest, id=name) for name, *rest in GENERATIONS])
def test_generations_of_programs_are_answered(client, body, ignored):
    answer = client(**LENIENT).post("/v1/images/generations", json=body)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"]) == min(body.get("n", 1), 2)
    assert answer.json()["arimage"]["ignored"] == ignored and answer.json()["arimage"]["model"] == "text"
    usage = answer.json()["usage"]
    assert usage["total_tokens"] == usage["output_tokens"] == 16 * len(answer.json()["data"])


@pytest.mark.every(2)
@pytest.mark.parametrize(("fields", "name", "ignored"), [pytest.param(*rest, id=name) for name, *rest in EDITS])
def test_edits_of_programs_without_a_mask_generate_the_whole_image(client, fields, name, ignored):
    files = [(name, ("image.png", png("red"), "image/png"))]
    answer = client(**LENIENT).post("/v1/images/edits", data=fields, files=files)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["arimage"]["edited"], answer.json()["arimage"]["ignored"]) == ("whole", ignored)


@pytest.fixture(scope="module")
def reading():
    engine = Engine({"reads": tiny_emu35.pipeline()})
    yield engine
    engine.close()


@pytest.mark.every(2)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_of_openai_edits_pictures(reading, several, stream):
    pictures = [("a.png", png("red")), ("b.png", png("blue"))]
    with TestClient(build_server(reading, **LENIENT), base_url="http://127.0.0.1") as client:
        images = openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=client).images
        answer = images.edit(
            model="gpt-image-1",
            image=pictures if several else pictures[0],
            prompt="make it blue",
            size="1536x1024",
            input_fidelity="high",
            background="auto",
            quality="high",
            output_format="webp",
            output_compression=80,
            **({"stream": True, "partial_images": 2} if stream else {}),
        )
        file = (list(answer)[-1] if stream else answer.data[0]).b64_json
    assert Image.open(io.BytesIO(base64.b64decode(file))).format == "WEBP"


@pytest.mark.skipif(not can_write_mp4(), reason="the extra `video` is not installed")
@pytest.mark.parametrize("kind", ["multipart/form-data", "application/json"])
def test_videos_of_programs_are_answered(engine, kind):
    """What OpenAI's documentation sends with curl and with JavaScript."""
    body = {"model": "sora-2", "prompt": "A calico cat playing a piano", "seconds": "8", "size": "1280x720"}
    maker = VideoMaker({"film": tiny_cosmos.pipeline("text", begins_with_text=True)})
    with TestClient(build_server(engine, videos=maker, **LENIENT), base_url="http://127.0.0.1") as client:
        if kind == "application/json":
            answer = client.post("/v1/videos", json=body)
        else:
            answer = client.post("/v1/videos", files={name: (None, value) for name, value in body.items()})
        assert answer.status_code == 200 and answer.json()["status"] in ("queued", "in_progress"), answer.text
        assert client.get(f"/v1/videos/{answer.json()['id']}").headers["openai-poll-after-ms"]


def test_a_mask_and_a_hole_are_still_read(client):
    holed = Image.new("RGBA", (8, 8), (255, 0, 0, 255))
    holed.paste((0, 0, 0, 0), (0, 4, 8, 8))
    data = io.BytesIO()
    holed.save(data, "PNG")
    for files in ({"image": data.getvalue()}, {"image": png("red"), "mask": data.getvalue()}):
        answer = client(**LENIENT).post("/v1/images/edits", data={"prompt": "a"}, files=files)
        assert answer.status_code == 200 and "edited" not in answer.json()["arimage"]
    # A mask that was sent and changes nothing is a mistake of its sender.
    files = {"image": png("red"), "mask": png("red")}
    answer = client(**LENIENT).post("/v1/images/edits", data={"prompt": "a"}, files=files)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "mask"


@pytest.mark.parametrize(
    ("path", "sent", "status", "parameter"),
    [
        ("generations", {"json": {"prompt": "a", "step": 15}}, 400, "step"),
        ("generations", {"json": {"prompt": "a", "n": 10}}, 400, "n"),
        ("generations", {"json": {"prompt": "a", "negative_prompt": "b"}}, 400, "negative_prompt"),
        ("generations", {"json": {"prompt": "a", "model": "dall-e-3"}}, 404, "model"),
        ("generations", {"json": {"prompt": "a", "n": 0}}, 400, "n"),
        ("generations", {"json": {"prompt": "a" * 4001}}, 400, "prompt"),
        ("edits", {"data": {"prompt": "a"}, "files": {"image": png("red")}}, 400, "mask"),
        ("edits", {"data": {"prompt": "a", "strength": "1"}, "files": {"image": png("red")}}, 400, "strength"),
    ],
)
def test_without_the_options_they_are_refused(client, path, sent, status, parameter):
    answer = client().post(f"/v1/images/{path}", **sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, parameter)


ORIGIN = "https://chat.example.org"


def test_pages_of_an_allowed_origin_may_send_requests(client):
    headers = {"Origin": ORIGIN, "Sec-Fetch-Site": "cross-site"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for tokens in ((), ("a-token",)):
        server = client(allow_origin=(ORIGIN,), tokens=tokens)
        preflight = server.options("/v1/images/generations", headers=headers | asked)
        assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == ORIGIN
        given = headers | ({"Authorization": f"Bearer {tokens[0]}"} if tokens else {})
        answer = server.post("/v1/images/generations", json={"prompt": "a"}, headers=given)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    refused = server.post("/v1/images/generations", json={"prompt": "a"}, headers=headers)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ORIGIN


def test_pages_of_other_origins_are_refused(client):
    for options in ({}, {"allow_origin": (ORIGIN,)}):
        headers = {"Origin": "https://evil.example.org", "Sec-Fetch-Site": "cross-site"}
        answer = client(**options).post("/v1/images/generations", json={"prompt": "a"}, headers=headers)
        assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
        preflight = client(**options).options(
            "/v1/images/generations", headers=headers | {"Access-Control-Request-Method": "POST"}
        )
        assert preflight.status_code in (400, 403) and "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize("origin", ["*", "chat.example.org", "https://chat.example.org/", "https://a.org/page"])
def test_an_origin_is_one_scheme_and_host(engine, origin):
    with pytest.raises(ValueError, match="--allow-origin is .*as in https://chat.example.org"):
        build_server(engine, allow_origin=(origin,))
