"""Images by OpenAI's Chat Completions and Responses APIs, with its client, and variations."""

import base64
import gc
import io
import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from app.server.server_kit import serving
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from PIL import Image
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.llamagen import tiny as tiny_llamagen
from pydantic import TypeAdapter
from starlette.testclient import TestClient

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits, Request
from arimage.app.server.app import build_server
from arimage.app.server.routes import chat, generating, responses, schemas


TOOL = {"type": "image_generation"}


@pytest.fixture(scope="module")
def engine():
    pipelines = {"text": tiny_llamagen.text_pipeline(), "reads": tiny_emu35.pipeline()}
    engine = Engine(pipelines, Limits(images=2))
    yield engine
    engine.close()


@pytest.fixture
def web(engine):
    with TestClient(build_server(engine), base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture
def client(web):
    return openai.OpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=web, max_retries=0)


def data_url(colour: str = "red", mode: str = "RGB") -> str:
    data = io.BytesIO()
    Image.new(mode, (8, 8), colour).save(data, "PNG")
    return f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"


def opened(data: str | bytes) -> Image.Image:
    if isinstance(data, str):
        data = base64.b64decode(data.rpartition(",")[2])
    return Image.open(io.BytesIO(data)).convert("RGB")


def expected(engine, **request) -> bytes:
    request = {"model": "text", "prompt": "a red heart", "seed": 3} | request
    return engine.submit(Request(**request)).result(60).images[0].tobytes()


def asked(text: str, *urls: str) -> list[dict]:
    """The messages of a chat whose last one of the user has this text and these images."""
    images = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
    return [
        {"role": "system", "content": "You draw."},
        {"role": "user", "content": "a blue book"},
        {"role": "assistant", "content": "![image](http://127.0.0.1/pictures/none)"},
        {"role": "user", "content": [{"type": "text", "text": text}, *images] if urls else text},
    ]


@pytest.mark.parametrize("route", ["chat/completions", "responses", "images/generations"])
def test_requests_that_wait_hold_no_bodies(held, route):
    engine, url = Engine({"text": held}), data_url((0, 0, 0, 0), "RGBA")
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": url}]
    tool = {**TOOL, "input_image_mask": {"image_url": url}}
    body = {"input": [{"role": "user", "content": parts}], "tools": [tool], "instructions": url}
    if route == "chat/completions":
        body = {"messages": asked("a", url), "user": url}
    elif route == "images/generations":
        body = {"prompt": "a", "unknown": url}
    with serving(engine, lenient=True) as address, ThreadPoolExecutor() as pool:
        answer = pool.submit(httpx.post, f"{address}/v1/{route}", json=body, timeout=60)
        assert held.entered.wait(30)
        gc.collect()
        kinds = (chat.ChatMessage, responses.Item, schemas.EmbeddedImage)
        found = [one for one in gc.get_objects() if type(one) in kinds]
        found += [one for one in gc.get_objects() if type(one) is schemas.LenientFields and one.model_extra]
        held.go.set()
        assert answer.result().status_code == 200
    assert not found


# Chats


def test_a_chat_answers_with_images(client, web, engine):
    for modalities in (None, ["image", "text"]):
        answer = client.chat.completions.create(
            model="text",
            messages=asked("a red heart"),
            n=2,
            seed=3,
            temperature=0,
            max_tokens=4096,
            extra_body={"modalities": modalities, "image_config": {"size": "8x8", "decoding": "sjd:window=4"}},
        )
        TypeAdapter(ChatCompletion).validate_python(answer.to_dict())
        assert [choice.index for choice in answer.choices] == [0, 1] and answer.model == "text"
        message = answer.choices[0].message
        if modalities is None:
            url = message.content.removeprefix("![image](").removesuffix(")")
            assert "images" not in message.model_extra
            shown = opened(web.get(httpx.URL(url).path).content)
        else:
            assert message.content == ""
            [image] = message.model_extra["images"]
            assert image["type"] == "image_url"
            shown = opened(image["image_url"]["url"])
        assert shown.tobytes() == expected(engine, count=2, decoding="sjd:window=4")
        assert answer.model_extra["arimage"]["ignored"] == ["max_tokens", "temperature"]
        assert answer.usage.completion_tokens == answer.usage.total_tokens == 32


def test_a_chat_is_streamed(client, engine):
    with client.chat.completions.create(
        model="text",
        messages=asked("a red heart"),
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"modalities": ["image"]},
    ) as stream:
        chunks = list(stream)
    for chunk in chunks:
        TypeAdapter(ChatCompletionChunk).validate_python(chunk.to_dict())
    first, shown, last, usage = chunks
    assert first.choices[0].delta.role == "assistant" and last.choices[0].finish_reason == "stop"
    [image] = shown.choices[0].delta.model_extra["images"]
    assert opened(image["image_url"]["url"]).tobytes() == expected(engine)
    assert usage.choices == [] and usage.usage.total_tokens == 16
    assert last.model_extra["arimage"]["seeds"] == [3]


def test_the_url_in_a_chat_may_hold_the_image(client, engine):
    answer = client.chat.completions.create(
        model="text",
        messages=asked("a red heart"),
        seed=3,
        extra_body={"image_config": {"response_format": "b64_json"}},
    )
    content = answer.choices[0].message.content
    assert content.startswith("![image](data:image/png;base64,")
    assert opened(content.removesuffix(")")).tobytes() == expected(engine)


def test_images_of_the_last_message_are_read(client, engine):
    url = data_url()
    answer = client.chat.completions.create(
        model="reads", messages=asked("make it blue", url), seed=3, extra_body={"modalities": ["image"]}
    )
    given = expected(engine, model="reads", prompt="make it blue", references=(Image.new("RGB", (8, 8), "red"),))
    assert opened(answer.choices[0].message.model_extra["images"][0]["image_url"]["url"]).tobytes() == given
    # A model that edits by masks reads one where the image is transparent.
    answer = client.chat.completions.create(
        model="text", messages=asked("a", data_url("#ff000000", "RGBA")), extra_body={"modalities": ["image"]}
    )
    assert answer.choices[0].message.model_extra["images"]


@pytest.mark.parametrize(
    ("body", "parameter", "message"),
    [
        ({"messages": []}, "messages", "messages is not valid"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages", "from the user"),
        ({"messages": asked("")}, "prompt", "the prompt is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages", "texts and images"),
        ({"messages": [{"role": "user"}]}, "messages", "texts and images"),
        ({"messages": asked("a", "https://example.org/a.png")}, "messages", "is not a data URL"),
        ({"messages": asked("a", data_url())}, "mask", "no mask was sent"),
        ({"messages": asked("a", data_url(), data_url())}, "image", "send one image"),
        ({"n": 2, "stream": True}, "n", "a stream has one image"),
        ({"n": 3}, "n", "ask for 1 to 2"),
        ({"image_config": {"size": "9x9"}}, "size", "choose among"),
        ({"image_config": {"steps": 9}}, "steps", "unknown field"),
        ({"image_config": {"partial_images": 2}}, "image_config", "leave it out"),
        ({"steps": 9}, "steps", "unknown field"),
        ({"seed": "3"}, "seed", "seed is not valid"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused(web, body, parameter, message):
    answer = web.post("/v1/chat/completions", json={"messages": asked("a")} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == parameter and message in error["message"]


# What programs send to models that answer with images, from their source code or documentation in 2025 and 2026.
PROGRAMS = [
    ("OpenRouter", {"modalities": ["image", "text"], "image_config": {"aspect_ratio": "16:9"}}, ["aspect_ratio"]),
    (
        "Open WebUI",
        {"stream": True, "stream_options": {"include_usage": True}, "modalities": ["image"]},
        [],
    ),
    (
        "LibreChat",
        {"user": "6", "stream": True, "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0},
        ["frequency_penalty", "presence_penalty", "temperature", "top_p", "user"],
    ),
    ("Vercel", {"modalities": ["text", "image"], "stream": False}, []),
    (
        "vLLM-Omni",
        {"height": 512, "width": 512, "num_inference_steps": 20},
        ["height", "num_inference_steps", "width"],
    ),
]


@pytest.mark.parametrize(("body", "ignored"), [pytest.param(*rest, id=name) for name, *rest in PROGRAMS])
def test_chats_of_programs_are_answered(engine, body, ignored):
    with TestClient(build_server(engine, lenient=True), base_url="http://127.0.0.1") as web:
        body = {"model": "google/gemini-2.5-flash-image", "messages": asked("a red heart")} | body
        answer = web.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        *chunks, done = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
        parts, facts = zip(*[(one["choices"], one.get("arimage")) for one in map(json.loads, chunks)], strict=True)
        message, facts = parts[1][0]["delta"], next(filter(None, facts))
    else:
        message, facts = answer.json()["choices"][0]["message"], answer.json()["arimage"]
    assert facts["ignored"] == ignored
    assert bool(message.get("images")) == ("modalities" in body) == (not message["content"])


# Responses


def test_a_response_calls_the_tool(client, engine):
    for given in ("a red heart", [{"role": "user", "content": [{"type": "input_text", "text": "a red heart"}]}]):
        answer = client.responses.create(
            model="text",
            input=given,
            tools=[TOOL | {"size": "8x8", "quality": "high", "seed": 3}],
            metadata={"one": "two"},
        )
        TypeAdapter(Response).validate_python(answer.to_dict())
        [item] = answer.output
        assert (item.type, item.status, item.size) == ("image_generation_call", "completed", "8x8")
        assert opened(item.result).tobytes() == expected(engine)
        assert answer.status == "completed" and answer.metadata == {"one": "two"} and answer.output_text == ""
        assert answer.usage.output_tokens == 16 and answer.model_extra["arimage"]["seeds"] == [3]


def test_a_response_is_streamed(client, engine):
    with client.responses.stream(
        model="gpt-5", input="a red heart", tools=[TOOL | {"model": "text", "partial_images": 2, "seed": 3}]
    ) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert opened(final.output[0].result).tobytes() == expected(engine)
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    call = "response.image_generation_call"
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        f"{call}.in_progress",
        f"{call}.generating",
        *[f"{call}.partial_image"] * 2,
        f"{call}.completed",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.partial_image_index for event in events[5:7]] == [0, 1]
    assert opened(events[5].partial_image_b64).size == (8, 8)
    assert len({event.item_id for event in events if event.type.startswith(call)}) == 1


def test_a_response_edits_images(client, engine):
    def message(*urls):
        images = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
        return [{"role": "user", "content": [{"type": "input_text", "text": "make it blue"}, *images]}]

    red, given = data_url(), (Image.new("RGB", (8, 8), "red"),)
    for action, references in (("auto", given), ("edit", given), ("generate", ())):
        tool = TOOL | {"action": action, "seed": 3}
        answer = client.responses.create(model="reads", input=message(red), tools=[tool])
        request = {"model": "reads", "prompt": "make it blue", "references": references}
        assert opened(answer.output[0].result).tobytes() == expected(engine, **request)
    mask = {"input_image_mask": {"image_url": data_url("#00000000", "RGBA")}}
    assert client.responses.create(model="text", input=message(red), tools=[TOOL | mask]).output


@pytest.mark.parametrize(
    ("body", "parameter", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole input"),
        ({"background": True}, "background", "stored"),
        ({"input": []}, "input", "from the user"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "a"}]}]}, "input", "images"),
        ({"tools": [TOOL | {"frame_count": 9}]}, "frame_count", "unknown field"),
        ({"tools": [TOOL | {"n": 2}]}, "n", "a response has one image"),
        ({"tools": [TOOL | {"action": "edit"}]}, "tools", "send one"),
        ({"tools": [TOOL | {"partial_images": 4}]}, "partial_images", "partial_images"),
        ({"steps": 9}, "steps", "unknown field"),
        ({"metadata": {"one": 1}}, "metadata.one", "metadata"),
    ],
)
def test_a_response_that_cannot_be_given_is_refused(web, body, parameter, message):
    answer = web.post("/v1/responses", json={"model": "text", "input": "a"} | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == parameter and message in error["message"]


def test_other_tools_and_fields_about_text_have_no_effect(client):
    answer = client.responses.create(
        model="text", input="a", instructions="b", tools=[{"type": "web_search"}, TOOL], temperature=0.5
    )
    assert answer.model_extra["arimage"]["ignored"] == ["instructions", "temperature", "tools"]


# Streams


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("images/generations", {"prompt": "a"}),
        ("chat/completions", {"messages": asked("a")}),
        ("responses", {"input": "a"}),
    ],
)
def test_a_silent_stream_has_heartbeats_and_tells_its_error(held, monkeypatch, path, body):
    monkeypatch.setattr(generating, "HEARTBEAT_SECONDS", 0.01)

    def failing(**_):
        assert held.go.wait(60)
        raise RuntimeError

    with serving(Engine({"text": held})) as address:
        held.prepare = failing
        with httpx.stream("POST", f"{address}/v1/{path}", json=body | {"stream": True}) as answer:
            assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
            lines = answer.iter_lines()
            assert sum(line.startswith(":") for line in (next(lines) for _ in range(40))) > 5
            held.go.set()
            last = [line for line in lines if line.startswith("data: ")][-1]
    found = json.loads(last[6:])
    error = found["response"]["error"] if path == "responses" else found["error"]
    assert "see the log" in error["message"]


# Variations


def test_an_image_is_varied_by_a_model_that_reads_it(client, engine):
    png = base64.b64decode(data_url().partition(",")[2])
    answer = client.images.create_variation(image=png, model="reads", n=2, extra_body={"seed": 3})
    given = {"model": "reads", "references": (Image.new("RGB", (8, 8), "red"),), "count": 2}
    assert opened(answer.data[0].b64_json).tobytes() == expected(engine, prompt="a variation of this image", **given)
    with pytest.raises(openai.BadRequestError, match="choose among reads") as refused:
        client.images.create_variation(image=png, model="text")
    assert refused.value.param == "image"
