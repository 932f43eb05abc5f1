"""Photos that clients upload: as large as phones take them, and as small as the model needs before they wait."""

import asyncio
import io
import threading

import httpx
import openai
import pytest
from app.server.server_kit import serving
from PIL import Image
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.llamagen import tiny as tiny_llamagen
from starlette.testclient import TestClient

from arimage.app.engine.engine import Engine
from arimage.app.server import bodies
from arimage.app.server.app import build_server
from arimage.app.server.routes import generating


@pytest.fixture(scope="module")
def engine():
    engine = Engine({"text": tiny_llamagen.text_pipeline(), "reads": tiny_emu35.pipeline()})
    yield engine
    engine.close()


@pytest.fixture
def submitted(engine, monkeypatch):
    """The requests that reach the engine."""
    requests, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda request, *rest: (requests.append(request), submit(request, *rest))[1])
    return requests


@pytest.fixture
def client(engine):
    with TestClient(build_server(engine, lenient=True), base_url="http://127.0.0.1") as client:
        yield openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", max_retries=0, http_client=client)


def photo(width: int, height: int, **options) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (width, height), (200, 60, 30)).save(data, "JPEG", **options)
    return data.getvalue()


def test_an_image_of_a_size_of_openai_is_edited_without_a_mask(client, submitted):
    answer = client.images.edit(image=("a.jpg", photo(1536, 1024)), prompt="a", model="text", size="1536x1024")
    assert answer.size == "8x8" and submitted[0].image.size == submitted[0].mask_image.size == (8, 8)


def test_a_larger_one_is_refused_before_it_is_decoded(client, monkeypatch):
    monkeypatch.setattr("arimage.app.engine.uploads.to_rgba", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(openai.BadRequestError, match="8000x8000 pixels: give one of at most 50000000"):
        client.images.edit(image=("a.jpg", photo(8000, 8000)), prompt="a", model="text")


def test_too_many_references_are_refused_before_one_is_decoded(client, monkeypatch):
    monkeypatch.setattr(generating, "read_upload", lambda *_: pytest.fail("one was decoded"))
    with pytest.raises(openai.BadRequestError, match="takes 3 reference images, not 4"):
        client.images.edit(image=[("a.jpg", photo(8, 8))] * 4, prompt="a", model="reads")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "names", [("image[]",) * 2, ("image[1]", "image[0]"), ("image[]", "image[0]"), ("image",) * 2]
)
def test_pictures_may_be_numbered(engine, submitted, names):
    with TestClient(build_server(engine), base_url="http://127.0.0.1") as client:
        files = [(name, ("a.jpg", photo(16, side), "image/jpeg")) for name, side in zip(names, (8, 32), strict=True)]
        answer = client.post("/v1/images/edits", data={"prompt": "a", "model": "reads"}, files=files)
        assert answer.status_code == 200, answer.text
    heights = [reference.height for reference in submitted[0].references]
    assert heights == ([32, 8] if "image[0]" in names else [8, 32])


def test_few_photos_are_decoded_at_a_time(engine, monkeypatch):
    read, lock, now, most = generating.read_upload, threading.Lock(), 0, 0

    def slow(*arguments):
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        threading.Event().wait(0.05)
        image = read(*arguments)
        with lock:
            now -= 1
        return image

    monkeypatch.setattr(generating, "read_upload", slow)
    own = Engine({"text": tiny_llamagen.text_pipeline()})
    with serving(own, lenient=True) as address:
        asked = {"data": {"prompt": "a"}, "files": {"image": photo(64, 64)}}

        async def ask():
            async with httpx.AsyncClient(timeout=60) as client:
                return await asyncio.gather(*(client.post(f"{address}/v1/images/edits", **asked) for _ in range(8)))

        assert {answer.status_code for answer in asyncio.run(ask())} == {200}
    assert most == 2


def test_the_memory_of_bodies_is_bounded(engine, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODIES", 1000)
    app = build_server(engine, lenient=True)
    with TestClient(app, base_url="http://127.0.0.1") as client:
        asked = {"data": {"prompt": "a", "model": "text"}, "files": {"image": photo(64, 64)}}
        # One alone is read whatever its size.
        assert client.post("/v1/images/edits", **asked).status_code == 200
        assert app.state.server.bodies.held == 0
        app.state.server.bodies.held = 900
        refused = client.post("/v1/images/edits", **asked)
        assert refused.status_code == 429 and refused.headers["retry-after"]
