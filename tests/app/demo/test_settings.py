"""The form of the Generate tab, as its page sends it: what each model takes, links, and the help of every control."""

import json
import uuid
from contextlib import closing
from urllib.parse import parse_qsl, urlencode

import pytest
from adapters import adapter
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.emu35 import tiny as tiny_emu35
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.mammothmoda2 import tiny as tiny_mammothmoda2
from safetensors.torch import save_file


pytest.importorskip("gradio")

from app.demo.demo_kit import file_data, served, visit

from arimage.app.demo import links, pictures
from arimage.app.demo.controls import class_choices
from arimage.app.engine.adapters import active_adapters, name_in_pipeline
from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Request
from arimage.app.engine.videos import VideoMaker
from arimage.media.metadata import KEY, to_text
from arimage.pipelines.text.known import EXAMPLES
from arimage_emoji.known import KnownCaptions


class Page:
    """A visitor of the Generate tab, whose `form` has the values of its controls by label."""

    def __init__(self, client):
        self.client, self.session = client, uuid.uuid4().hex
        config = client.get("/config").json()
        self.properties = {one["id"]: one["props"] for one in config["components"]}
        self.functions = [one for one in config["dependencies"] if one["backend_fn"]]
        self.generate = self.function(lambda number: self.properties[number].get("elem_id") == "generate", "click")
        # The first label is the one of this tab.
        values = [(self.label(one), self.properties[one].get("value")) for one in self.generate["inputs"]]
        self.form = dict(values)

    def label(self, number: int) -> str:
        return str(self.properties[number].get("label"))

    def function(self, is_target, event: str) -> dict:
        return next(
            one for one in self.functions for number, name in one["targets"] if name == event and is_target(number)
        )

    def choose(self, model: str) -> dict[str, bool]:
        """Choose a model, and return which controls are shown then."""
        self.form["Model"] = model
        chosen = self.function(lambda number: number == self.generate["inputs"][0], "input")
        data = [self.form[self.label(one)] for one in chosen["inputs"]]
        body = {"data": data, "fn_index": chosen["id"], "session_hash": self.session}
        updates = self.client.post("/gradio_api/run/predict", json=body).json()["data"]
        every = [*zip(chosen["outputs"], updates, strict=True)]
        tries = [self.properties[one]["samples"] for one, new in every if self.label(one) == "Try" and new["visible"]]
        self.tries = [prompt for samples in tries for [prompt] in samples]
        found = {self.label(one): update for one, update in every if self.label(one) != "Try"}
        found = {label: update for label, update in found.items() if isinstance(update, dict)}
        self.form |= {label: update["value"] for label, update in found.items() if "value" in update}
        return {label: update["visible"] for label, update in found.items() if "visible" in update}

    def made(self) -> dict[str, str]:
        """Generate, and return the settings in the link."""
        [link] = [value for value in self._run(self.generate) if str(value).startswith("?")]
        return dict(parse_qsl(link[1:]))

    def open(self, query: dict[str, str]) -> list:
        """Click a picture of the history, and return the last values of everything."""
        reopen = self.function(lambda number: self.properties[number].get("elem_id") == "history", "click")
        return self._run(reopen, event_data={"link": f"?{urlencode(query)}"})

    def drop(self, data: bytes) -> list | str:
        """Drop a picture on its field, and return the last values of everything, or the error."""
        answer = self.client.post("/gradio_api/upload", files={"files": ("picture.png", data, "image/png")})
        opens = self.function(lambda number: self.properties[number].get("elem_id") == "from-picture", "upload")
        self.form[self.label(opens["inputs"][0])] = file_data(answer.json()[0])
        return self._run(opens)

    def _run(self, function: dict, **event) -> list | str:
        data = [self.form[self.label(one)] for one in function["inputs"]]
        body = {"data": data, "fn_index": function["id"], "session_hash": self.session, **event}
        assert self.client.post("/gradio_api/queue/join", json=body).status_code == 200
        with self.client.stream("GET", "/gradio_api/queue/data", params={"session_hash": self.session}) as events:
            messages = [json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line]
        if messages[-2]["msg"] == "process_completed" and not messages[-2]["success"]:
            return messages[-2]["output"]["error"]
        [first, *_] = [one for one in messages if one["msg"].startswith("process_") and "output" in one]
        last = messages[-2]
        assert last["msg"] == "process_completed", last
        for number, value in zip(function["outputs"], first["output"]["data"], strict=True):
            label, given = self.label(number), value.get("value") if isinstance(value, dict) else value
            if label in self.form and (not isinstance(value, dict) or "value" in value):
                self.form[label] = given
        return last["output"]["data"]


@pytest.fixture(scope="module")
def engine():
    named = tiny_llamagen.class_pipeline()
    named.name_classes({i: "crane" if i else "tench, Tinca tinca" for i in range(named.num_classes)})
    icons = tiny_llamagen.text_pipeline()
    icons.known_captions = KnownCaptions({"heart": []}, examples=["heart", "thin heart"])
    pipelines = {
        "text": tiny_llamagen.text_pipeline(),
        "icons": icons,
        "names": named,
        "ids": tiny_llamagen.class_pipeline(),
    }
    pipelines |= {"sizes": tiny_emu35.pipeline(), "steps": tiny_mammothmoda2.pipeline()}
    with closing(Engine(pipelines)) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine):
    videos = VideoMaker({"video": tiny_cosmos.pipeline("text", begins_with_text=True)})
    with served(engine, None, videos) as url, visit(url) as client:
        yield client


def test_the_form_shows_what_a_model_takes(client):
    page = Page(client)
    rare = {"Class", "Size", "Negative prompt", "Decoder steps", "Decoder guidance"}
    expected = {
        "names": {"Class"},
        "ids": {"Class"},
        "sizes": {"Size", "Negative prompt"},
        "steps": {"Negative prompt", "Decoder steps", "Decoder guidance"},
        "text": set(),
        "icons": set(),
    }
    for model, shown in expected.items():
        visible = page.choose(model)
        assert {label for label in rare if visible[label]} == shown, model
        assert visible["Prompt"] == bool(page.tries) == ("Class" not in shown)
        assert visible["References: pictures that the model reads with the prompt"] == (model == "sizes")
    assert page.tries == ["heart", "thin heart"] and page.choose("text")["Prompt"] and page.tries == EXAMPLES


def test_classes_are_chosen_by_name(client, engine):
    assert class_choices(engine.models["names"])[:2] == [("tench, Tinca tinca · 0", "0"), ("crane · 1", "1")]
    assert class_choices(engine.models["ids"])[3] == ("3", "3")
    page = Page(client)
    for model in ("names", "ids"):
        page.choose(model)
        # The second model has the class of the first one.
        page.form["Class"] = "3" if model == "names" else page.form["Class"]
        assert page.made() == {"model": model, "class_label": "3", "seed": "0", "decoding": "ar"}


@pytest.mark.slow
def test_sizes_and_what_to_avoid_are_settings_of_the_image_and_its_link(client, engine):
    page = Page(client)
    page.choose("sizes")
    # The size of the last reference, or else that of the model.
    assert page.form["Size"] == "automatic" and "width" not in page.made()
    page.form |= {"Size": "64x48", "Negative prompt": "a cat", "Seed": 3}
    found = page.made()
    assert (found["width"], found["height"], found["negative_prompt"]) == ("64", "48", "a cat")
    request = links.from_query(found, engine)
    assert (request.width, request.height, request.negative_prompt, request.seed) == (64, 48, "a cat", 3)
    page.choose("steps")
    assert page.form["Size"] == "32x32" and not page.form["Negative prompt"]
    page.form |= {"Decoder steps": 1, "Decoder guidance": 2.5}
    found = page.made()
    assert (found["num_inference_steps"], found["decoder_guidance_scale"]) == ("1", "2.5")
    assert not {"negative_prompt", "width", "height"} & found.keys()


def test_a_link_fills_the_form_of_another_model(client):
    page = Page(client)
    link = {
        "model": "sizes",
        "prompt": "a cat",
        "width": "80",
        "height": "32",
        "negative_prompt": "a dog",
        "top_k": "7",
    }
    page.open(link)
    shown = ("Model", "Prompt", "Size", "Negative prompt", "Top-k", "Images", "Seed")
    assert [page.form[label] for label in shown] == ["sizes", "a cat", "80x32", "a dog", 7, 1, 0]
    assert link.items() <= page.made().items()
    # The other side is that of the model.
    page.open({"model": "sizes", "prompt": "a cat", "height": "48"})
    assert page.form["Size"] == "64x48"
    # The name of a class is that class.
    page.open({"model": "names", "prompt": "Tinca tinca"})
    assert (page.form["Model"], page.form["Class"]) == ("names", "0")


def test_a_dropped_picture_fills_the_form_and_is_made_again(client, engine):
    asked = Request("text", prompt="a blue book", seed=11, top_k=7, decoding="sjd:window=8", count=2)
    [_, picture] = engine.submit(asked).result(60).images
    page = Page(client)
    found = page.drop(pictures.png(picture))
    shown = ("Model", "Prompt", "Top-k", "Images", "Decoding")
    assert [page.form[label] for label in shown] == ["text", "a blue book", 7, 1, "sjd:window=8"]
    [link] = [value for value in found if str(value).startswith("?")]
    again = links.from_query(dict(parse_qsl(link[1:])), engine)
    assert engine.submit(again).result(60).images[0].tobytes() == picture.tobytes()
    classes = engine.submit(Request("names", class_label=1)).result(60).images[0]
    page.drop(pictures.png(classes))
    assert (page.form["Model"], page.form["Class"]) == ("names", "1")


def grey(**settings) -> Image.Image:
    """A picture that says it was made with these settings."""
    picture = Image.new("RGB", (8, 8), "grey")
    picture.info[KEY] = to_text({"seed": 7} | settings)
    return picture


def test_a_dropped_picture_that_the_demo_cannot_make_is_refused(client):
    page = Page(client)
    assert "does not say how it was made" in page.drop(pictures.png(Image.new("RGB", (8, 8))))
    assert "the picture asks for the model var" in page.drop(pictures.png(grey(model="var", class_label=3)))
    assert "a video" in page.drop(pictures.png(grey(model="video", prompt="x", num_frames=9)))
    sheet = grey(model="text", prompts=["x", "y"], count=2)
    assert "several prompts" in page.drop(pictures.png(sheet))
    wrong = grey(model="sizes", prompt="x", height=8, width=8)
    assert "does not generate 8x8" in page.drop(pictures.png(wrong))


def test_the_form_takes_what_it_can_of_a_dropped_picture_and_says_what_it_lacks(client, engine):
    page = Page(client)
    photo, mask = Image.new("RGB", (8, 8)), Image.new("L", (8, 8), "white")
    edit = engine.submit(Request("text", prompt="tree", seed=7, image=photo, mask_image=mask)).result(60)
    read = engine.submit(Request("sizes", prompt="make it blue", seed=7, references=(photo,))).result(60)
    lora = ["styles/mine.safetensors:0.5", "b:1"]
    for picture, model, prompt, sentence in (
        (grey(model="<janus>", prompt="fir", top_k=3), "text", "fir", "made by &lt;janus&gt;, which is not here"),
        (
            grey(model="runs/icons", prompt="a fir", lora=lora),
            "icons",
            "a fir",
            "made with the adapter mine.safetensors:0.5 and b:1, and the model here has no adapter",
        ),
        (edit.images[0], "text", "tree", "load that one in the tab Edit"),
        # Its transparent part was generated again.
        (grey(model="text", prompt="fir", made_from=["image"]), "text", "fir", "load that one in the tab Edit"),
        (read.images[0], "sizes", "make it blue", "add them"),
    ):
        found = page.drop(pictures.png(picture))
        assert sentence in json.dumps(found) and not any(str(value).startswith("?") for value in found)
        assert [page.form[label] for label in ("Model", "Prompt", "Seed")] == [model, prompt, 7]


def test_a_dropped_picture_is_made_again_with_the_adapters_that_the_demo_has(tmp_path):
    pytest.importorskip("peft", reason="the extra `lora` is not installed")
    pipe = tiny_llamagen.text_pipeline()
    save_file(adapter(pipe), tmp_path / "mine.safetensors")
    file = str(tmp_path / "mine.safetensors")
    pipe.load_lora_weights(file, adapter_name=name_in_pipeline("mine"))
    adapters = active_adapters("text", [f"mine={file}:0.5"])
    with closing(Engine(dict.fromkeys(adapters, pipe), adapters=adapters)) as engine:
        for model in adapters:
            picture = engine.submit(Request(model, prompt="tree", seed=7)).result(60).images[0]
            (tmp_path / "made.png").write_bytes(pictures.png(picture))
            query, lacks = links.query_of_picture(tmp_path / "made.png", engine)
            assert query["model"] == model and lacks == []
            again = engine.submit(links.from_query(query, engine)).result(60)
            assert again.images[0].tobytes() == picture.tobytes()


def test_a_dropped_picture_may_name_its_class(tmp_path, engine):
    (tmp_path / "made.png").write_bytes(pictures.png(grey(model="names", class_label="Tinca tinca")))
    query, lacks = links.query_of_picture(tmp_path / "made.png", engine)
    assert links.from_query(query, engine).class_label == 0 and lacks == []


def test_a_link_without_its_references_waits_for_them(client, engine):
    reference = Image.new("RGB", (80, 32), "red")
    asked = Request("sizes", prompt="make it blue", references=(reference,))
    query = dict(parse_qsl(links.to_query(asked, engine.submit(asked).result(60), engine)[1:]))
    assert query["references"] == "1"
    page = Page(client)
    found = page.open(query)
    assert page.form["Prompt"] == "make it blue" and "add them" in json.dumps(found)
    assert not any(str(value).startswith("?") for value in found)
