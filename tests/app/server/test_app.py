"""The server with the client of OpenAI, with plain HTTP, and with clients that misbehave."""

import base64
import io
import json
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx
import numpy as np
import openai
import pytest
from app.server.serve_kit import BACKENDS, backend_of
from app.server.server_kit import free_port, metric, picture, same, serving, started, wait_for
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var
from starlette.testclient import TestClient
from typer.testing import CliRunner

from arimage import LlamaGenPipeline
from arimage.app.engine.engine import Engine
from arimage.app.engine.models import parse_aliases
from arimage.app.engine.types import Limits, Request
from arimage.app.server import state as server_module
from arimage.app.server.app import build_server
from arimage.app.server.routes.leniency import nearest_size
from arimage.app.server.uvicorn_server import Server, serve_until_stopped
from arimage.cli import main as cli
from arimage.pipelines.infinity.schedules import SCHEDULES
from arimage_emoji.known import KnownCaptions


TOKEN = "a-token-of-the-tests"
CLASSES = ["tench", "retriever", "crane", "otter", "finch", "crane", "tabby", "Eskimo dog", "hen", "sea lion"]
JSON = {"Content-Type": "application/json"}


def known_pipeline():
    pipe = tiny_llamagen.text_pipeline()
    pipe.known_captions = KnownCaptions({"red heart": ["heart"], "tree": ["fir"]}, unlearned={"wizard": ["wizard"]})
    return pipe


def pipelines():
    return {
        "text": tiny_llamagen.text_pipeline(),
        "scales": tiny_var.pipeline("text"),
        "class": tiny_llamagen.class_pipeline(),
        "known": known_pipeline(),
        "named": LlamaGenPipeline(**tiny_llamagen.class_pipeline().components, id2label=dict(enumerate(CLASSES))),
    }


@pytest.fixture(scope="module")
def engine():
    """Generates the images that a server should answer with."""
    engine = Engine(pipelines(), Limits(gathering=0.05))
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["engine", pytest.param("replicas", marks=pytest.mark.slow)])
def address(request):
    with backend_of(request.param, pipelines(), Limits(gathering=0.05)) as (backend, _), serving(backend) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def other_engine():
    engine = Engine({"text": tiny_llamagen.text_pipeline()})
    yield engine
    engine.close()


@pytest.fixture(params=BACKENDS)
def secret_address(request):
    """A server that asks for a token."""
    with (
        backend_of(request.param, {"text": tiny_llamagen.text_pipeline()}, Limits()) as (backend, _),
        serving(backend, tokens=[TOKEN]) as address,
    ):
        yield address


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def test_the_openai_client_gets_images(client, engine):
    answer = client.images.generate(
        model="text",
        prompt="a red heart",
        n=2,
        size="8x8",
        response_format="b64_json",
        quality="high",
        background="auto",
        style="vivid",
        moderation="low",
        user="somebody",
        extra_body={"seed": 3, "decoding": "sjd:window=4", "top_k": 8, "temperature": 0.9, "top_p": 1.0, "min_p": 0.1},
    )
    settings = {"seed": 3, "decoding": "sjd:window=4", "top_k": 8, "temperature": 0.9, "min_p": 0.1}
    request = Request("text", prompt="a red heart", count=2, **settings)
    expected = engine.submit(request).result(60)
    assert len(answer.data) == 2 and abs(answer.created - time.time()) < 60
    for one, image in zip(answer.data, expected.images, strict=True):
        assert one.url is None and one.revised_prompt is None
        assert picture(one.b64_json).format == "PNG" and same(picture(one.b64_json), image)
    assert (answer.size, answer.output_format) == ("8x8", "png")
    extension = answer.model_extra["arimage"]
    assert extension["seeds"] == expected.seeds and extension["exact"] is True
    assert extension["passes"] == expected.passes < 16 and extension["decoding"] == "sjd:window=4"
    assert extension["tokens_per_pass"] == pytest.approx(expected.tokens_per_pass)
    assert (extension["settings"]["top_k"], extension["settings"]["min_p"]) == (8, 0.1)


@pytest.mark.parametrize("extra_body", [{}, {"seed": -1}])
def test_without_a_seed_images_differ_and_name_their_seed(client, extra_body):
    answers = [client.images.generate(prompt="a red heart", extra_body=extra_body) for _ in range(2)]
    assert answers[0].data[0].b64_json != answers[1].data[0].b64_json
    seed = answers[0].model_extra["arimage"]["seeds"][0]
    again = client.images.generate(prompt="a red heart", size="auto", extra_body={"seed": seed})
    assert same(picture(again.data[0].b64_json), picture(answers[0].data[0].b64_json))


@pytest.mark.parametrize(("output_format", "media_type"), [("png", "image/png"), ("webp", "image/webp")])
def test_images_come_by_url(client, address, output_format, media_type):
    answer = client.images.generate(
        prompt="a", response_format="url", output_format=output_format, n=2, extra_body={"seed": 1}
    )
    assert [one.b64_json for one in answer.data] == [None, None]
    assert re.fullmatch(rf"{address}/pictures/[\w-]{{32}}", answer.data[0].url)
    assert answer.data[0].url != answer.data[1].url
    response = httpx.get(answer.data[0].url)
    assert (response.status_code, response.headers["content-type"]) == (200, media_type)
    shown = picture(response.content)
    assert shown.format == output_format.upper() and shown.size == (8, 8)


def test_images_by_url_expire_and_are_bounded(monkeypatch):
    clock = [0.0]
    # Not `time.monotonic` itself: the loops of running servers read it.
    monkeypatch.setattr(server_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    kept = server_module.KeptFiles()
    names = [kept.add(b"%d" % i, "image/png") for i in range(server_module.KEPT + 1)]
    assert len(set(names)) == len(names)
    assert kept.get(names[0]) is None and kept.get(names[1]) == (b"1", "image/png")
    clock[0] = server_module.KEPT_SECONDS + 1.0
    assert kept.get(names[1]) is None
    kept.add(b"", "image/png")
    assert len(kept._files) == 1
    # The newest is stored in any case.
    monkeypatch.setattr(server_module, "KEPT_BYTES", 10)
    names = [kept.add(bytes(size), "image/png") for size in (6, 4, 1, 11)]
    assert [kept.get(name) is None for name in names] == [True, True, True, False]


def test_classes_and_scales_are_generated_too(client, engine):
    # The client always sends a prompt.
    answer = client.images.generate(model="class", prompt="", extra_body={"class_label": 4, "seed": 2})
    expected = engine.submit(Request("class", class_label=4, seed=2)).result(60)
    assert same(picture(answer.data[0].b64_json), expected.images[0])
    answer = client.images.generate(model="scales", prompt="green tree", extra_body={"seed": 2, "decoding": "code"})
    assert answer.model_extra["arimage"]["exact"] is False and answer.model_extra["arimage"]["passes"] == 4


def test_a_stream_shows_partial_images(client, engine):
    stream = client.images.generate(prompt="a cat", stream=True, partial_images=3, extra_body={"seed": 5})
    *partial, last = list(stream)
    assert [event.type for event in partial] == ["image_generation.partial_image"] * len(partial)
    assert [event.partial_image_index for event in partial] == list(range(len(partial)))
    assert len(partial) == 3 and picture(partial[0].b64_json).size == (8, 8)
    assert (last.type, last.size, last.output_format) == ("image_generation.completed", "8x8", "png")
    expected = engine.submit(Request("text", prompt="a cat", seed=5)).result(60)
    assert same(picture(last.b64_json), expected.images[0])
    assert last.model_extra["arimage"]["passes"] == 16
    assert not same(picture(partial[0].b64_json), picture(last.b64_json))


def test_an_unknown_prompt_is_reported_with_the_nearest_captions(client):
    unknown = {
        "nearest": ["red heart"],
        "message": '"a hart" is not among the 2 pictures that known knows; the nearest is "red heart"',
    }
    answer = client.images.generate(model="known", prompt="a hart", n=2)
    assert len(answer.data) == 2 and answer.model_extra["arimage"]["unknown_prompt"] == unknown
    *_, last = client.images.generate(model="known", prompt="a hart", stream=True, partial_images=1)
    assert last.type == "image_generation.completed" and last.model_extra["arimage"]["unknown_prompt"] == unknown
    found = client.images.generate(model="known", prompt="a wizard").model_extra["arimage"]["unknown_prompt"]
    assert "has not learned well" in found["message"]
    for model, prompt in (("known", "A heart."), ("text", "a hart")):
        assert client.images.generate(model=model, prompt=prompt).model_extra["arimage"]["unknown_prompt"] is None


def test_a_class_is_named_by_the_prompt(client, engine):
    answer = client.images.generate(model="named", prompt="Otter", n=2, extra_body={"seed": 2})
    expected = engine.submit(Request("class", class_label=3, seed=2, count=2)).result(60)
    assert all(same(picture(one.b64_json), image) for one, image in zip(answer.data, expected.images, strict=True))
    assert answer.model_extra["arimage"]["settings"]["class_label"] == 3
    for prompt, message in (("oter", 'the nearest is "otter"'), ("crane", r"classes \[2, 5\]")):
        with pytest.raises(openai.BadRequestError, match=message) as refused:
            client.images.generate(model="named", prompt=prompt)
        assert refused.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="not both"):
        client.images.generate(model="named", prompt="otter", extra_body={"class_label": 3})


def test_an_edit_changes_where_the_mask_is_transparent(client, engine):
    before = engine.submit(Request("text", prompt="a red heart", seed=1)).result(60).images[0]
    mask = Image.new("RGBA", (8, 8), (0, 0, 0, 255))
    mask.paste((0, 0, 0, 0), (0, 4, 8, 8))
    options = {"prompt": "a blue book", "n": 2, "extra_body": {"seed": 2}, "model": "text"}
    holed = before.convert("RGBA")
    holed.putalpha(mask.getchannel("A"))
    # What is transparent counts as white, whatever colour is under it.
    white = before.copy()
    white.paste("white", (0, 4, 8, 8))
    edited = client.images.edit(image=("a.png", png(white)), mask=("m.png", png(mask)), **options)
    # An image with holes needs no mask; the client may send a list.
    again = client.images.edit(image=[("../../a.png", png(holed))], **options)
    for one, other in zip(edited.data, again.data, strict=True):
        after = picture(one.b64_json)
        assert same(after, picture(other.b64_json))
        assert same(after.crop((0, 0, 8, 4)), before.crop((0, 0, 8, 4)))
        assert not same(after.crop((0, 4, 8, 8)), before.crop((0, 4, 8, 8)))
    stream = client.images.edit(image=png(holed), prompt="a", stream=True, partial_images=1)
    assert [event.type for event in stream] == ["image_edit.partial_image", "image_edit.completed"]


def test_models_are_listed(client, address):
    assert [model.id for model in client.models.list()] == ["text", "scales", "class", "known", "named"]
    model = client.models.retrieve("text")
    assert model.model_extra["arimage"]["sizes"] == ["8x8"] and model.model_extra["arimage"]["decodings"]["sjd"]
    assert client.models.retrieve("known").model_extra["arimage"]["names"] == ["red heart", "tree"]
    assert client.models.retrieve("named").model_extra["arimage"]["names"] == CLASSES
    assert client.models.retrieve("named").model_extra["arimage"]["examples"] == CLASSES[:5]
    assert client.models.retrieve("class").model_extra["arimage"]["examples"] == []
    assert model.model_extra["arimage"]["examples"] and "gallery" not in model.model_extra["arimage"]
    with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-image-1': choose among text"):
        client.models.retrieve("gpt-image-1")
    schema = httpx.get(f"{address}/openapi.json").json()
    assert "guidance_scale" in json.dumps(schema["paths"]["/v1/images/generations"])


@pytest.mark.parametrize(
    ("arguments", "error", "parameter", "code", "message"),
    [
        ({"model": "dall-e-3"}, openai.NotFoundError, "model", "model_not_found", "unknown model 'dall-e-3'"),
        ({"prompt": ""}, openai.BadRequestError, "prompt", None, "the prompt is empty"),
        ({"n": 9}, openai.BadRequestError, "n", None, "ask for 1 to 8"),
        ({"n": "many"}, openai.BadRequestError, "n", None, "n is not valid"),
        ({"size": "1792x1024"}, openai.BadRequestError, "size", None, "1792x1024 pixels (width x height): choose"),
        ({"size": "large"}, openai.BadRequestError, "size", None, "size is not valid"),
        ({"output_format": "svg"}, openai.BadRequestError, "output_format", None, "output_format is not valid"),
        ({"stream": True, "n": 2}, openai.BadRequestError, "n", None, "a stream has one image, not 2"),
        (
            {"background": "transparent", "output_format": "jpeg"},
            openai.BadRequestError,
            "background",
            None,
            "a jpeg has no transparent background",
        ),
        ({"extra_body": {"seed": 2.5}}, openai.BadRequestError, "seed", None, "seed is not valid"),
        ({"extra_body": {"decoding": "/etc/passwd"}}, openai.BadRequestError, "decoding", None, "cannot run"),
        ({"extra_body": {"decoding": "x" * 999}}, openai.BadRequestError, "decoding", None, "at most 200"),
        ({"extra_body": {"decodng": "sjd"}}, openai.BadRequestError, "decodng", "unknown_parameter", "leave it out"),
    ],
)
def test_errors_are_those_of_openai(client, arguments, error, parameter, code, message):
    with pytest.raises(error) as raised:
        client.images.generate(**{"prompt": "a", **arguments})
    assert (raised.value.param, raised.value.code, raised.value.type) == (parameter, code, "invalid_request_error")
    assert message in raised.value.body["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "Invalid JSON"),
        (b'{"prompt": "a", "temperature": NaN}', ""),
        (b"[]", "the body is not valid"),
        (b'{"prompt": "\\ud83d"}', ""),
        (b"\xff", "Invalid JSON"),
        (b'{"prompt": "a", "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "recursion"),
    ],
)
def test_malformed_bodies_are_refused(address, body, message):
    response = httpx.post(f"{address}/v1/images/generations", content=body, headers=JSON)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_photos_are_edited_as_viewers_show_them(client):
    shown = np.full((8, 8, 3), 255, np.uint8)
    shown[:4] = 90
    hole = Image.fromarray(np.where(np.arange(64).reshape(8, 8) < 2, 0, 255).astype(np.uint8))
    exif, files = Image.Exif(), {}
    exif[0x0112] = 6
    for name, image in (("image", Image.fromarray(shown)), ("mask", Image.merge("LA", [hole, hole]))):
        data = io.BytesIO()
        image.transpose(Image.Transpose.ROTATE_90).save(data, "PNG", exif=exif)
        files[name] = data.getvalue()
    edited = client.images.edit(prompt="a blue book", model="text", **files)
    after = np.asarray(picture(edited.data[0].b64_json))
    assert np.array_equal(after[2:], shown[2:]) and not np.array_equal(after[:2, :2], shown[:2, :2])


def test_malformed_edits_are_refused(client, address):
    whole = png(Image.new("RGB", (8, 8)))
    huge = png(Image.new("1", (8000, 8000)))
    for files, message in (
        ({"image": whole}, "no mask was sent"),
        ({"image": b"GIF89a"}, "image cannot be read"),
        ({"image": png(Image.effect_noise((64, 64), 50))[:1000]}, "image cannot be read"),
        ({"image": huge}, "image has 8000x8000 pixels"),
        ({"image": whole, "mask": b""}, "mask cannot be read"),
        ({"image": whole, "mask": png(Image.new("RGBA", (8, 8), "white"))}, "the mask has no transparency"),
        ({"image": whole, "mask": png(Image.new("RGBA", (7, 900)))}, "mask_image has 7x900 pixels and image 8x8"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.images.edit(prompt="a", **files)
    url = f"{address}/v1/images/edits"
    assert "multipart/form-data" in httpx.post(url, content=b"x").json()["error"]["message"]
    response = httpx.post(url, content=b"--x\r\n", headers={"content-type": "multipart/form-data"})
    assert response.status_code == 400 and "the form cannot be read" in response.text
    assert "send image" in httpx.post(url, files={"mask": whole}).json()["error"]["message"]
    assert httpx.post(url, files=[("image", whole)] * 3).status_code == 400
    for parts, message in (
        ([("image", whole)] * 17, "more than 16 files"),
        ([(f"field {i}", (None, "a")) for i in range(65)], "more than 64 fields"),
        ([("prompt", (None, "a"))] * 2, "prompt is sent several times"),
    ):
        assert message in httpx.post(url, files=parts).json()["error"]["message"]


def data_url(image: Image.Image) -> dict:
    return {"image_url": "data:image/png;base64," + base64.b64encode(png(image)).decode()}


def test_an_edit_may_be_json(client, address):
    whole, mask = Image.effect_noise((8, 8), 50).convert("RGB"), Image.new("RGBA", (8, 8), "white")
    mask.paste((0, 0, 0, 0), (0, 4, 8, 8))
    holed = whole.copy()
    holed.putalpha(mask.getchannel("A"))
    # What is transparent counts as white.
    whole.paste("white", (0, 4, 8, 8))
    expected = client.images.edit(image=png(whole), mask=png(mask), prompt="a", extra_body={"seed": 3})
    url, same_fields = f"{address}/v1/images/edits", {"prompt": "a", "seed": 3, "model": "text", "mask": None}
    for body in ({"images": [data_url(whole)], "mask": data_url(mask)}, {"images": [data_url(holed)]}):
        answer = httpx.post(url, json=same_fields | body).raise_for_status().json()
        assert same(picture(answer["data"][0]["b64_json"]), picture(expected.data[0].b64_json))
    with httpx.stream("POST", url, json=same_fields | {"images": [data_url(holed)], "stream": True}) as stream:
        assert "image_edit.completed" in stream.read().decode()
    schema = httpx.get(f"{address}/openapi.json").json()["paths"]["/v1/images/edits"]["post"]["requestBody"]["content"]
    assert {"images", "mask", "seed"} <= schema["application/json"]["schema"]["properties"].keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": None}, "images"),
        ({"images": [None]}, "images.0"),
        ({"images": [{"file_id": "file-1"}]}, "images.0"),
        ({"images": [{"image_url": "data:,", "file_id": "x"}]}, "file_id"),
        ({"images": [{"image_url": "http://127.0.0.1/secret.png"}]}, "is not a data URL"),
        ({"images": [{"image_url": "data:image/png,AAAA"}]}, "is not a data URL"),
        ({"images": [{"image_url": "data:image/png;base64,@@@"}]}, "is not base64"),
        ({"images": [{"image_url": "data:image/png;base64,\u00e9"}]}, "is not base64"),
        ({"images": [{"image_url": "data:image/png;base64,AAAA"}]}, "image cannot be read"),
        ({"images": [data_url(Image.new("RGBA", (8, 8)))] * 17}, "images"),
        ({"images": [data_url(Image.new("RGBA", (8, 8)))] * 2}, "takes no reference images"),
        ({"mask": {"image_url": "https://example.org/m.png"}}, "mask is not a data URL"),
        ({"mask": data_url(Image.new("RGBA", (9, 8)))}, "mask_image has 9x8 pixels"),
        ({"image": "x"}, "unknown field 'image'"),
        ({"prompt": {"a": [[]] * 9}}, "prompt"),
    ],
)
def test_malformed_edits_as_json_are_refused(address, changes, message):
    body = {"prompt": "a", "images": [data_url(Image.new("RGBA", (8, 8)))]} | changes
    response = httpx.post(f"{address}/v1/images/edits", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


FOREIGN = [
    ({"Host": "evil.example"}, 400),
    ({"Host": "evil.example", "Origin": "http://evil.example"}, 400),
    ({"Origin": "http://evil.example"}, 403),
    ({"Origin": "http://localhost.evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "image"}, 403),
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
]


@pytest.mark.parametrize(("headers", "status"), FOREIGN)
def test_pages_of_other_sites_are_refused(address, headers, status):
    body = b'{"prompt": "a", "response_format": "url"}'
    url = f"{address}/v1/images/generations"
    response = httpx.post(url, content=body, headers=JSON | headers)
    assert response.status_code == status and "evil" not in response.text
    if status != 415:
        assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "images.example"])
def test_the_server_answers_to_its_own_names(other_engine, host):
    app = build_server(other_engine, base_url="https://images.example/arimage")
    with TestClient(app, base_url=f"http://{host}") as client:
        own = {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
        assert client.get("/v1/models", headers=own).status_code == 200
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document", "Sec-Fetch-Mode": "navigate"}
        assert client.get("/v1/models", headers=link).status_code == 200
        assert client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 400
    # A server with a token has any name.
    with TestClient(build_server(other_engine, tokens=[TOKEN]), base_url="http://images.example") as client:
        assert client.get("/v1/models", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    with pytest.raises(ValueError, match="base-url"):
        build_server(other_engine, base_url="images.example")


def test_a_head_is_answered_as_a_get(address):
    for path in ("/health", "/v1/models", "/v1/models/text", "/", "/metrics", "/openapi.json"):
        response = httpx.head(address + path)
        assert (response.status_code, response.content) == (200, b"")
    assert httpx.head(f"{address}/pictures/none").status_code == 404
    assert httpx.head(f"{address}/v1/images/generations").status_code == 405


def test_large_bodies_are_not_read(address):
    url = f"{address}/v1/images/generations"
    size = 2**25 * 4 // 3 + 2**16

    def chunks():
        for _ in range(size // 2**16 + 1):
            yield b" " * 2**16

    for content in (b" " * (size + 1), chunks()):
        response = httpx.post(url, content=content, headers=JSON, timeout=60)
        assert response.status_code == 413 and "send smaller images" in response.json()["error"]["message"]


def test_only_the_token_opens(secret_address):
    address = secret_address
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}, {"Authorization": "Bearer \xe4"}):
        for method, path in (("POST", "/v1/images/generations"), ("GET", "/v1/models"), ("GET", "/metrics")):
            encoded = {name: value.encode("latin-1") for name, value in headers.items()}
            response = httpx.request(method, address + path, headers=encoded)
            assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong").images.generate(prompt="a")
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN)
    answer = client.images.generate(prompt="a", response_format="url")
    # A browser that shows the image sends no token.
    assert httpx.get(answer.data[0].url).status_code == 200
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    counted = metric(address, "arimage_requests_total", {"Authorization": f"Bearer {TOKEN}"}, status="401")
    assert counted == 5


@pytest.fixture(scope="module")
def lenient(other_engine):
    """A client of a server that accepts the model names and sizes of other servers."""
    app = build_server(other_engine, aliases={"gpt-image-1": "text", "dall-e-3": "text"}, lenient=True)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=client)


def test_an_alias_is_listed_and_generates_as_its_model(lenient, other_engine):
    assert [model.id for model in lenient.models.list()] == ["text", "gpt-image-1", "dall-e-3"]
    assert lenient.models.retrieve("gpt-image-1").model_extra["arimage"]["model"] == "text"
    answers = [
        lenient.images.generate(model=model, prompt="a red heart", extra_body={"seed": 3})
        for model in ("gpt-image-1", "text")
    ]
    assert same(*(picture(answer.data[0].b64_json) for answer in answers))
    assert answers[0].model_extra["arimage"]["model"] == "text"
    assert lenient.images.generate(model="gpt-image-2", prompt="a").model_extra["arimage"]["model"] == "text"
    strict = build_server(other_engine, aliases={"gpt-image-1": "text"})
    with TestClient(strict, base_url="http://127.0.0.1") as client:
        answer = client.post("/v1/images/generations", json={"model": "gpt-image-2", "prompt": "a"})
    assert answer.status_code == 404 and "'gpt-image-2': choose among text, gpt-image-1" in answer.text


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        (["gpt-image-1"], "not of the form ALIAS=MODEL"),
        (["=text"], "not of the form ALIAS=MODEL"),
        (["gpt-image-1=dall-e"], "a model that is not served: choose among text, scales"),
        (["scales=text"], "already"),
        (["a=text", "a=scales"], "already"),
    ],
)
def test_aliases_stand_for_models_that_are_served(aliases, message):
    with pytest.raises(ValueError, match=message):
        parse_aliases(aliases, ["text", "scales"])
    assert parse_aliases(["gpt-image-1=scales"], ["text", "scales"]) == {"gpt-image-1": "scales"}


def test_a_lenient_server_generates_the_nearest_size(lenient):
    for options in ({"size": "1024x1024"}, {"size": "1536x1024", "extra_body": {"seed": 1}}, {"size": "auto"}):
        answer = lenient.images.generate(prompt="a", **options)
        assert answer.size == "8x8" and picture(answer.data[0].b64_json).size == (8, 8)
    *_, last = lenient.images.generate(prompt="a", size="1024x1024", stream=True)
    assert last.size == "8x8"
    holed = png(Image.new("RGBA", (8, 8)))
    assert lenient.images.edit(image=holed, prompt="a", size="1024x1024").size == "8x8"


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [((1024, 1024), (512, 512)), ((200, 200), (256, 256)), ((1792, 1024), (592, 448)), ((300, 900), (384, 688))],
)
def test_nearness_is_by_shape_and_area(asked, nearest):
    sizes = [(256, 256), (512, 512), (592, 448), (384, 688)]
    assert nearest_size(asked, sizes) == nearest
    for pixels, square, found in (("1M", 512, (1024, 1024)), ("0.06M", 1024, (256, 256))):
        sizes = [(16 * rows, 16 * columns) for (rows, columns), one in SCHEDULES.items() if one.pixels == pixels]
        assert nearest_size((square, square), sizes) == found


def test_the_index_page_describes_the_server(other_engine):
    with TestClient(build_server(other_engine, aliases={"<b>": "text"}), base_url="http://127.0.0.1:8000") as client:
        page = client.get("/", headers={"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "document"})
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "<code>text</code>" in page.text and "&lt;b&gt;</code>, which is text" in page.text
        assert "http://127.0.0.1:8000/v1/images/generations" in page.text
        for link in re.findall(r'href="([^"]+)"', page.text):
            assert client.get(link).status_code == 200
    with TestClient(build_server(other_engine, tokens=[TOKEN])) as client:
        assert client.get("/").status_code == 401


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "no token is set"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--alias", "gpt-image-1=emoji-var"], "a model that is not served: choose among emoji-llamagen"),
    ],
)
def test_the_command_refuses_before_it_loads(options, message, monkeypatch):
    monkeypatch.delenv("ARIMAGE_TOKEN", raising=False)
    monkeypatch.setattr("arimage.app.engine.models.load_models", lambda *_: pytest.fail("a model was loaded"))
    result = CliRunner().invoke(cli.app, ["serve", "--model", "emoji-llamagen", *options])
    assert isinstance(result.exception, ValueError) and message in str(result.exception)


@pytest.mark.parametrize("command", ["serve", "app"])
def test_an_address_that_is_not_free_is_refused_before_loading(command, monkeypatch):
    monkeypatch.setattr("arimage.app.engine.models.load_models", lambda *_, **__: pytest.fail("a model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for option, value in (
            ("--port", str(taken.getsockname()[1])),
            ("--host", "localhost:80"),
            ("--host", "203.0.113.7"),
        ):
            access = {"serve": ["--no-auth"], "app": ["--auth", "user:password"]}[command]
            result = CliRunner().invoke(cli.app, [command, option, value, *access])
            assert isinstance(result.exception, ValueError) and f"{option} {value} is" in str(result.exception)


def test_the_command_serves_and_ends_on_ctrl_c(tmp_path):
    tiny_llamagen.text_pipeline().save_pretrained(tmp_path / "model")
    (tmp_path / "token").write_text(TOKEN)
    port = free_port()
    command = [sys.executable, "-m", "arimage", "serve", "--model", str(tmp_path / "model"), "--port", str(port)]
    with started([*command, "--token-file", str(tmp_path / "token")]) as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key=TOKEN)
        url = client.images.generate(prompt="a red heart", response_format="url").data[0].url
        assert picture(httpx.get(url).content).size == (8, 8)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        log = process.stdout.read()
        assert "Traceback" not in log and "a red heart" not in log
        # Anyone who knows the URL of an image can see it.
        assert "GET /pictures/" in log and url.rpartition("/")[2] not in log


def test_an_engine_that_fails_ends_the_server(held, monkeypatch):
    engine = Engine({"text": held})
    server = Server(build_server(engine), engine, "127.0.0.1", free_port(), log_level="warning")
    failed = []

    def run():
        try:
            serve_until_stopped(server, engine)
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: server.started)
    monkeypatch.setattr(held._pipe, "encode_prompt", lambda prompts: sys.exit("out of here"))
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(client.images.generate, prompt="a", extra_body={"top_k": k}) for k in (1, 2)]
        wait_for(lambda: len(engine._waiting) + len(engine._running) == 2)
        held.go.set()
        for answer in asked:
            with pytest.raises(openai.InternalServerError):
                answer.result(60)
    thread.join(60)
    assert isinstance(failed[0].__cause__, SystemExit) and not engine.alive
