"""Values of other types at the demo's endpoints and in its tabs: each is refused in a sentence."""

import io
import json

import pytest
import tiny
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var


pytest.importorskip("gradio")

from app.demo.demo_kit import call, file_data, served, visit

from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits
from arimage.app.engine.videos import VideoMaker


GENERATE = ["prompt", "model", "class_label", "decoding", "seed", "count", "guidance_scale", "temperature", "top_k"]
GENERATE += ["top_p", "preview_every", "min_p", "references", "width", "height", "negative_prompt", "order"]
GENERATE += ["num_inference_steps", "decoder_guidance_scale"]
COMPARE = ["prompt", "model", "class_label", "decodings", "seed"]
EDIT = ["image", "mask_image", "prompt", "model", "class_label", "decoding", "seed", "preview_every"]
GOOD = {"prompt": "a", "model": "text", "seed": 1, "count": 1, "preview_every": 0, "decodings": ["ar", "sjd"]}
FIELDS = {"generate": GENERATE, "compare": COMPARE, "edit": EDIT}
WRONG = ["hot", 5, 1.5, True, 10**400, [1], ["a"], [[]], {"a": {"b": []}}, {"path": "a"}, [file_data("a")], None]
# All of them, or two, others for each input.
HOW_MANY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "every"])
# What a field may be.
RIGHT = {
    "prompt": ("hot",), "class_label": (None,), "decoding": (None,), "seed": (5, None),
    "guidance_scale": (5, 1.5, None), "temperature": (5, 1.5, None), "top_k": (5, None), "top_p": (None,),
    "preview_every": (5,), "min_p": (None,), "references": (None,),
    "width": (None,), "height": (None,), "negative_prompt": (None,), "order": (None,), "num_inference_steps": (None,),
    "decoder_guidance_scale": (None,),
}  # fmt: skip


@pytest.fixture(scope="module")
def client():
    engine = Engine({"text": tiny_llamagen.text_pipeline(), "scales": tiny_var.pipeline("text")}, Limits(images=4))
    with served(engine, None, VideoMaker({"video": tiny_cosmos.pipeline("text", begins_with_text=True)})) as url:
        with visit(url) as client:
            yield client


@pytest.fixture(scope="module")
def picture(client):
    white = png(Image.new("RGB", (4 * tiny.SCALE_FACTOR,) * 2, "white"))
    return file_data(client.post("/gradio_api/upload", files={"files": ("a.png", white)}).json()[0])


def wrong(place: int, every: bool) -> list:
    return WRONG if every else WRONG[place % 6 :: 6]


def errors(events: str) -> str:
    """The sentence of an error."""
    lines = events.splitlines()
    assert "event: error" in lines, events
    sentence = json.loads(lines[lines.index("event: error") + 1].removeprefix("data: "))["error"]
    assert sentence and "\n" not in sentence
    return sentence


@pytest.mark.every(10)
@HOW_MANY
@pytest.mark.parametrize(("name", "field"), [(name, field) for name, fields in FIELDS.items() for field in fields])
def test_a_field_of_another_type_is_refused(client, picture, capfd, name, field, every):
    good = {**GOOD, "image": picture, "mask_image": picture}
    for value in wrong(FIELDS[name].index(field), every):
        if any(value is right or (type(value) is type(right) and value == right) for right in RIGHT.get(field, ())):
            continue
        events = call(client, name, [{**good, field: value}.get(one) for one in FIELDS[name]])
        sentence = errors(events)
        assert any(part in sentence for part in (field, "choices", "images", "pixels")) or value in (None, 5)
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("call/v2/nothing", {}),
        ("call/nothing", {"data": []}),
        ("run/nothing", {"data": []}),
        ("call/v2/generate", {"promt": "a"}),
        ("call/v2/edit", {}),
        ("call/generate", {}),
        ("call/generate", {"data": {}}),
        ("call/generate", [1]),
        ("queue/join", {"data": [], "fn_index": 9999, "session_hash": "x"}),
        ("queue/join", {"data": [], "fn_index": "a", "session_hash": "x"}),
        ("queue/join", {"data": []}),
    ],
)
def test_a_request_for_something_else_is_refused(client, capfd, path, body):
    answer = client.post(f"/gradio_api/{path}", json=body)
    assert answer.status_code in (400, 422) and answer.json()["detail"]
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_numbers_are_finite(client, text):
    body = json.dumps({"data": ["a", "text", *[None] * 3, 1, *[None] * 13]}).replace("[null", "null", 0)
    body = body.replace('"text", null, null, null, 1, null, null', f'"text", null, null, null, 1, null, {text}')
    head = {"Content-Type": "application/json"}
    answer = client.post("/gradio_api/call/generate", content=body, headers=head)
    if answer.status_code == 200:
        assert "temperature" in errors(client.get(f"/gradio_api/call/generate/{answer.json()['event_id']}").text)
    else:
        assert answer.status_code in (400, 422)


@HOW_MANY
def test_values_of_another_type_in_the_tabs_are_refused(client, picture, capfd, every):
    """Every input of every function of the page, in the function's own defaults otherwise."""
    config = client.get("/config").json()
    defaults = {one["id"]: one["props"].get("value") for one in config["components"]}
    for function in config["dependencies"]:
        if function["backend_fn"] and not function["api_name"]:
            for place in range(len(function["inputs"])):
                for value in wrong(place, every):
                    data = [defaults[one] for one in function["inputs"]]
                    data[place] = value
                    body = {"data": data, "fn_index": function["id"], "session_hash": "x", "event_data": value}
                    answer = client.post("/gradio_api/run/predict", json=body)
                    assert answer.status_code == 200 or answer.json()["error"], (function, place, value)
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_example_fills_the_prompt(client):
    config = client.get("/config").json()
    datasets = {one["id"] for one in config["components"] if one["type"] == "dataset"}
    clicks = [one["id"] for one in config["dependencies"] if datasets & {*one["inputs"]}]
    for function in clicks:
        answer = client.post("/gradio_api/run/predict", json={"data": [1], "fn_index": function, "session_hash": "x"})
        assert answer.status_code == 200 and answer.json()["data"][0]
    assert len(clicks) == 2


def png(image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"no image", "cannot be read"),
        (b"", "cannot be read"),
        (png(Image.effect_noise((64, 64), 50))[:-2000], "cannot be read"),
        (png(Image.new("1", (2**13, 2**13))), "8192x8192 pixels"),
    ],
)
def test_an_image_that_cannot_be_read_is_refused(client, picture, data, sentence):
    answer = client.post("/gradio_api/upload", files={"files": ("b.png", data)})
    if answer.status_code == 200:
        file = file_data(answer.json()[0])
        for files, name in (([file, picture], "image"), ([picture, file], "mask_image")):
            found = errors(call(client, "edit", [*files, "a", "text", None, None, 1, 0]))
            assert name in found and sentence in found
