"""The demo's endpoints as clients see them: partial results, settings, errors, access, and cancellation."""

import base64
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs

import httpx
import numpy as np
import pytest
import tiny
import torch
from app.conftest import SlowPipeline
from app.server.server_kit import same, wait_for
from PIL import Image
from pipelines.distilled_decoding import tiny as tiny_distilled
from pipelines.infinity import tiny as tiny_infinity
from pipelines.llamagen import tiny as tiny_llamagen
from pipelines.var import tiny as tiny_var


pytest.importorskip("gradio")

import gradio as gr
from app.demo.demo_kit import AUTH, served, visit
from gradio_client import Client, handle_file

from arimage import FewStepDecoding, __version__
from arimage.app.demo import gallery_tab, links, markup, pictures, race_tab
from arimage.app.engine.engine import Engine
from arimage.app.engine.types import Limits, Request, Result
from arimage.cli import main as cli
from arimage.media import film
from arimage.media.film import Film
from arimage.media.gallery import read_gallery
from arimage.media.metadata import KEY, to_text
from arimage_emoji import REFERENCE
from arimage_emoji.known import KnownCaptions


SIZE = 4 * tiny.SCALE_FACTOR


@pytest.fixture(scope="module")
def slow():
    return SlowPipeline(tiny_llamagen.text_pipeline(8))


@pytest.fixture(scope="module")
def engine(slow):
    pipelines = {
        "text": tiny_llamagen.text_pipeline(),
        "class": tiny_llamagen.class_pipeline(),
        "scales": tiny_var.pipeline("text"),
    }
    pipelines["bits"] = tiny_infinity.pipeline()
    engine = Engine(pipelines | {"slow": slow}, Limits(prompt_characters=40, images=4))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def url(engine):
    """The URL of a demo with the password `AUTH`."""
    with served(engine, AUTH) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return Client(url, auth=AUTH, verbose=False, download_files=False)


@pytest.fixture(scope="module")
def session(url):
    """The session of a browser that has logged in."""
    with httpx.Client(base_url=url, timeout=60) as session:
        assert session.post("/login", data={"username": AUTH[0], "password": AUTH[1]}).status_code == 200
        yield session


@pytest.fixture(scope="module")
def opened(session):
    """Fetch an image of a result: an item of a gallery, or a single one."""

    def opened(picture) -> Image.Image:
        return Image.open(io.BytesIO(session.get(picture.get("image", picture)["url"]).content))

    return opened


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize(
    ("model", "pipeline", "decoding", "passes"),
    [
        ("text", tiny_llamagen.text_pipeline, "ar", (16, 1)),
        ("bits", tiny_infinity.pipeline, "next-scale", (7, pytest.approx(2084 / 7))),
    ],
)
def test_partial_images_come_before_the_finished_ones(client, opened, model, pipeline, decoding, passes):
    asked = {"decoding": decoding, "seed": 5, "count": 2, "preview_every": 1, "api_name": "/generate"}
    *parts, (shown, state) = client.submit("a red heart", model, **asked)
    decided = [state["decided"] for _, state in parts]
    assert decided[0] == 0 and decided == sorted(decided) and len(decided) > 1
    partial = [len(shown) for shown, _ in parts]
    assert partial[0] == 0 and partial[-1] == 2
    assert len(shown) == 2 and state["seeds"][0] == 5
    assert (state["passes"], state["tokens_per_pass"], state["exact"]) == (*passes, True)
    [expected] = pipeline()("a red heart", decoding=decoding, generator=torch.Generator().manual_seed(5)).images
    assert same(opened(shown[0]).convert("RGB"), expected)


def test_an_image_holds_the_settings_that_generate_it_again(client, opened):
    shown, _ = client.predict("tree", "text", seed=3, count=2, top_k=7, decoding="sjd", api_name="/generate")
    second = opened(shown[1])
    settings = json.loads(second.info[KEY])
    assert (settings["top_k"], settings["decoding"]) == (7, "sjd") and settings.pop("version") == __version__
    assert settings["height"] == settings["width"] == SIZE
    # What rounds its numbers is not the demo's to choose.
    assert (settings.pop("dtype"), settings.pop("batch_size")) == ("float32", 2)
    again, _ = client.predict(**settings, api_name="/generate")
    assert np.array_equal(pixels(opened(again[0])), pixels(second))


def test_a_missing_seed_is_chosen_at_random(client):
    seeds = [client.predict(class_label=2, model="class", api_name="/generate")[1]["seeds"] for _ in range(2)]
    assert seeds[0] != seeds[1]


def test_decodings_are_compared_on_one_seed(client, opened):
    decodings = ["ar", "sjd-coupled:window=8", "zipar"]
    *parts, (shown, maps, rows) = client.submit(
        "a blue book", "text", decodings=decodings, seed=4, api_name="/compare"
    )
    assert [len(shown) for shown, _, _ in parts[:2]] == [1, 2]
    assert [row["decoding"] for row in rows] == decodings
    assert [row["exact"] for row in rows] == [True, True, False]
    assert rows[0]["passes"] == 16 >= rows[1]["passes"]
    # ar decides one token per forward pass: its map runs from the first colour to the last.
    first = pixels(opened(maps[0]))
    assert tuple(first[1, 1]) == (68, 1, 84) and tuple(first[-2, -2]) == (253, 231, 37)
    alone, _ = client.predict("a blue book", "text", decoding=decodings[1], seed=4, api_name="/generate")
    assert np.array_equal(pixels(opened(shown[1])), pixels(opened(alone[0])))


def test_next_scale_models_have_no_maps(client):
    _, maps, rows = client.predict("tree", "scales", decodings=["next-scale", "code"], seed=4, api_name="/compare")
    assert maps == [] and len(rows) == 2


def test_files_are_edited_as_viewers_show_them(client, opened, tmp_path):
    shown = np.full((SIZE, SIZE, 3), 255, np.uint8)
    shown[: SIZE // 2] = 90
    select = np.zeros((SIZE, SIZE), np.uint8)
    select[:2, :2] = 1
    image = Image.new("RGBA", (SIZE, SIZE))
    image.paste((90, 90, 90, 255), (0, 0, SIZE, SIZE // 2))
    mask = Image.merge("LA", [Image.new("L", image.size, 255), Image.fromarray(select * 255)])
    image.save(tmp_path / "image.png")
    mask.save(tmp_path / "mask.png")
    files = handle_file(tmp_path / "image.png"), handle_file(tmp_path / "mask.png")
    picture, _ = client.predict(*files, "tree", "text", seed=1, api_name="/edit")
    after = pixels(opened(picture))
    assert np.array_equal(after[2:], shown[2:]) and not np.array_equal(after[:2, :2], shown[:2, :2])


@pytest.mark.parametrize(("model", "size"), [("text", SIZE), ("scales", SIZE), ("bits", 32)])
def test_pixels_outside_the_mask_are_kept(client, opened, model, size, tmp_path):
    before = np.random.default_rng(0).integers(0, 256, (size, size, 3), dtype=np.uint8)
    mask = np.zeros((size, size), np.uint8)
    mask[size // 2 :] = 255
    Image.fromarray(before).save(tmp_path / "before.png")
    Image.fromarray(mask).save(tmp_path / "mask.png")
    files = handle_file(tmp_path / "before.png"), handle_file(tmp_path / "mask.png")
    picture, state = client.predict(*files, "tree", model, seed=1, api_name="/edit")
    after = pixels(opened(picture))
    assert np.array_equal(after[: size // 2], before[: size // 2])
    assert not np.array_equal(after[size // 2 :], before[size // 2 :])
    assert state["seeds"] == [1]


def test_a_cancelled_job_ends_at_once(client, engine, slow):
    slow.pace = 0.2
    job = client.submit("a red heart", "slow", decoding="ar", preview_every=1, api_name="/generate")
    while len(job.outputs()) < 2:
        time.sleep(0.02)
    began = time.monotonic()
    job.cancel()
    wait_for(lambda: not (engine.waiting or engine._running), 5)
    assert time.monotonic() - began < 5 < 64 * slow.pace


def test_each_page_and_program_is_a_client(client, session, url, engine, monkeypatch):
    clients, submit = [], engine.submit
    monkeypatch.setattr(engine, "submit", lambda asked: (clients.append(asked.client), submit(asked))[1])
    other = Client(url, auth=AUTH, verbose=False, download_files=False)
    for one in (client, client, other):
        one.predict("a red heart", "text", api_name="/generate")
    # Without a session there is only the address.
    for _ in range(2):
        answer = session.post("/gradio_api/call/v2/generate", json={"prompt": "a", "model": "text"})
        session.get(f"/gradio_api/call/v2/generate/{answer.json()['event_id']}")
    assert clients == [client.session_hash] * 2 + [other.session_hash] + ["127.0.0.1"] * 2


def test_a_client_that_vanishes_frees_its_place(session, engine, slow):
    slow.pace = 0.2
    for _ in range(2):
        answer = session.post("/gradio_api/call/v2/generate", json={"prompt": "a", "model": "slow", "decoding": "ar"})
        with session.stream("GET", f"/gradio_api/call/v2/generate/{answer.json()['event_id']}") as events:
            next(events.iter_lines())
    wait_for(lambda: not (engine.waiting or engine._running), 8)


def test_an_enlarged_image_is_reduced_to_the_original():
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    shown = pictures.for_editor(picture)
    assert shown.size == (512, 512)
    layer = Image.new("RGBA", shown.size)
    layer.paste((255, 61, 127, 255), (0, 256, 512, 512))
    again, mask = pictures.image_and_mask({"background": shown.convert("RGBA"), "layers": [layer]}, (64, 64))
    assert np.array_equal(np.asarray(again), np.asarray(picture))
    assert np.asarray(mask)[:32].max() == 0 and np.asarray(mask)[32:].min() == 255


def test_a_rectangle_takes_the_place_of_the_brush():
    drawing = {"background": Image.new("RGBA", (512, 512), "red"), "layers": []}
    image, mask = pictures.image_and_mask(drawing, (64, 32), (25, 50, 75, 100))
    expected = np.zeros((32, 64), np.uint8)
    expected[16:, 16:48] = 255
    assert image.size == (64, 32) and np.array_equal(np.asarray(mask), expected)


def result_of(engine, **fields) -> Result:
    return engine.submit(Request(**{"model": "text", "prompt": "tree"} | fields)).result(60)


@pytest.mark.parametrize(
    "fields",
    [
        {
            "prompt": "a cat & a dog + 100 %",
            "seed": 7,
            "decoding": "sjd:window=4",
            "count": 2,
            "top_k": 3,
            "min_p": 0.05,
        },
        {"model": "class", "prompt": None, "class_label": 3, "guidance_scale": 2.5},
        {"model": "scales", "temperature": 0.5, "decoding": "code"},
    ],
)
def test_a_link_holds_what_generates_the_images_again(engine, fields):
    asked = Request(**{"model": "text", "prompt": "tree"} | fields)
    result = engine.submit(asked).result(60)
    query = {name: value for name, (value,) in parse_qs(links.to_query(asked, result, engine)[1:]).items()}
    assert {"model", "seed", "decoding"} <= query.keys() <= {"prompt", *result.settings}
    # Gradio adds settings of its own, and sites that show a link add theirs.
    request = links.from_query(query | {"__theme": "dark", "utm_source": "x"}, engine)
    again = engine.submit(request).result(60)
    assert again.settings == result.settings
    assert all(np.array_equal(one, other) for one, other in zip(again.images, result.images, strict=True))


def test_a_short_link_takes_the_defaults(engine):
    assert links.from_query({}, engine) is links.from_query({"__theme": "dark"}, engine) is None
    assert links.from_query({"prompt": "tree"}, engine) == Request("text", prompt="tree")
    request = Request("text", prompt="tree")
    query = links.to_query(request, engine.submit(request).result(60), engine)
    assert query == "?model=text&prompt=tree&seed=0&decoding=ar"


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ({"model": "<b>"}, "the model &lt;b&gt;: choose among text"),
        ({"seed": "1.5"}, "seed=1.5"),
        ({"prompt": "tree", "seed": str(2**70)}, "seed is 1180591620717411303424: give at most"),
        ({"prompt": "tree", "seed": "9" * 5000}, "seed=9999"),
        ({"model": "class", "class_label": str(2**70)}, "class_label is 1180591620717411303424: give"),
        ({"prompt": "tree", "temperature": "nan"}, "temperature is nan: give"),
        ({"prompt": "tree", "decoding": "sjd:window=<script>"}, "window is '&lt;script&gt;': give a whole number"),
        ({"prompt": "tree", "decoding": "<i>"}, "cannot run the decoding '&lt;i&gt;'"),
        ({"prompt": "tree", "order": "<i>"}, "order"),
        ({"model": "text"}, "the prompt is empty"),
    ],
)
def test_a_link_that_cannot_be_read_is_refused(engine, query, sentence):
    with pytest.raises(gr.Error, match=sentence):
        links.from_query(query, engine)


def films(seconds: list[list[float]], size: int = 40) -> list[Film]:
    """Films of plain grey frames that get brighter."""
    return [
        Film([Image.new("RGB", (size, size), (40 * i, 40 * i, 40 * i)) for i in range(len(lane))], lane, len(lane) - 1)
        for lane in seconds
    ]


def read_frames(path: Path) -> list[tuple[Image.Image, int]]:
    with Image.open(path) as film:
        frames = []
        for number in range(film.n_frames):
            film.seek(number)
            film.load()
            frames.append((film.convert("RGB"), film.info["duration"]))
    return frames


@pytest.mark.slow
def test_other_models_race_too_and_a_student_from_the_beginning():
    student = tiny_distilled.pipeline("llamagen")
    student.decoding = FewStepDecoding(starts=(0, 2))
    engine = Engine(
        {"class": tiny_llamagen.class_pipeline(), "text": tiny_llamagen.text_pipeline(), "a student": student}
    )
    try:
        choices = dict(race_tab.run_choices(engine, "class"))
        others = {label: value for label, value in choices.items() if " · " in value or value.startswith("a student")}
        assert (
            others == {"a student · few-step:starts=0+2 · lossy": "a student few-step:starts=0+2"}
            and "ar" in choices.values()
        )
        runs = race_tab.some_runs(engine, "class")
        assert runs[0] == "ar" and len(runs) == 3 and runs[2] == "a student few-step:starts=0+2"
        assert len(race_tab.some_runs(engine, "text")) == 2
        asked = [race_tab.parse_run(engine, "class", value) for value in runs]
        assert asked == [("class", "ar"), ("class", runs[1]), ("a student", "few-step:starts=0+2")]
        run = race_tab.Comparison(engine).run(engine.submit, {"class_label": 3, "seed": 1, "film": True}, asked)
        results = {number: event for number, event in run if isinstance(event, Result)}
        assert [results[number].settings["model"] for number in range(3)] == ["class", "class", "a student"]
        assert [results[number].passes for number in (0, 2)] == [16, 2]
    finally:
        engine.close()


def test_a_race_shows_each_frame_when_it_was_there(tmp_path):
    slow, fast = [0.5, 1.0, 2.5], [0.2, 0.4]
    path = film.write_race(films([slow, fast]), "race a/b 0", tmp_path)
    assert path.name == "race-a-b-0.webp" and path.parent.parent == tmp_path
    now = 0
    for picture, duration in read_frames(path):
        # Equal frames are merged, so look at the start of each.
        for lane, seconds in enumerate((slow, fast)):
            shown = picture.getpixel((40 * lane + 20, film.CLOCK + 20))[0]
            seen = sum(second * 1000 <= now + 1 for second in seconds)
            assert abs(shown - (40 * (seen - 1) if seen else 255)) < 12
        now += duration
    assert now == 2500 + film.RESTS


def test_a_film_has_a_frame_per_forward_pass(tmp_path, engine):
    result = result_of(engine, film=True)
    frames = read_frames(film.write_film(result.film, "tree 0", tmp_path))
    assert len(frames) == result.passes + 1 == 17
    assert [duration for _, duration in frames] == [400] * 16 + [film.RESTS]


@pytest.fixture
def knowing():
    """An engine whose model knows two pictures, one of which the reference has."""
    pipe = tiny_llamagen.text_pipeline()
    pipe.known_captions = KnownCaptions({"hot dog": [], 'a "<b>"': []})
    engine = Engine({"text": pipe})
    engine.models["text"] = replace(engine.models["text"], gallery=REFERENCE)
    yield engine
    engine.close()


def test_the_gallery_has_every_picture_that_is_known(knowing):
    info = knowing.models["text"]
    html = gallery_tab.sheet(tuple(info.names.items()), info.gallery)
    assert html.count("<button") == 2 and html.count("<i ") == 1 and "<b>" not in html
    image = Image.open(io.BytesIO(base64.b64decode(re.search(r"base64,([^)]+)", html)[1])))
    pictures, gallery = read_gallery(REFERENCE)
    expected = pictures[gallery.index("hot dog")].permute(1, 2, 0).numpy() * 255
    shown = np.asarray(image.convert("RGB"))[:32, :32]
    assert np.abs(shown - expected).mean() < 12
    assert markup.suggestions(knowing).count("<option") == 2 and "<b>" not in markup.suggestions(knowing)
    assert "text knows 2 pictures" in markup.intro(knowing)


def test_the_gallery_shows_a_picture_by_the_caption_that_was_learned():
    known = KnownCaptions({"hot dog": ["sausage in a bun"]}, unlearned={"hot dog": ["hot dog"]})
    html = gallery_tab.sheet(tuple(known.shown.items()), REFERENCE)
    assert html.count("<i ") == 1 and 'data-name="sausage in a bun"' in html and "hot dog" not in html
    # Without a gallery they are texts.
    html = gallery_tab.sheet((("hot dog", "hot dog"), ('"<b>"', "b")), None)
    assert html.count("<button") == 2 and html.count("<i ") == 0 and "<b>" not in html


def test_an_unknown_prompt_links_to_known_ones(knowing):
    note = markup.finished(result_of(knowing, prompt="hot dogs <i>"))
    assert '<a href="?model=text&amp;prompt=hot+dog">hot dog</a>' in note and "<i>" not in note
    assert "note" not in markup.finished(result_of(knowing, prompt="hot dog"))


def test_equal_images_share_a_file_that_is_written_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    image = Image.new("RGB", (4, 4))
    path = Path(pictures.saved(image))
    before = path.stat()
    monkeypatch.setattr(os, "replace", None)
    assert pictures.saved(image.copy()) == str(path) and path.stat().st_ino == before.st_ino
    assert [file.name for file in path.parent.iterdir()] == ["image.png"]


def test_downloads_keep_to_their_folder(tmp_path):
    images = [Image.new("RGB", (4, 4), (i, 0, 0)) for i in range(2)]
    for seed, image in enumerate(images, 7):
        image.info[KEY] = to_text({"model": "m", "prompt": "x", "seed": seed})
    one = pictures.write_download(images[:1], "../../etc/passwd 7", tmp_path)
    assert one.name == "etc-passwd-7.png" and one.parent.parent == tmp_path
    assert json.loads(Image.open(one).info["arimage"])["seed"] == 7
    with zipfile.ZipFile(pictures.write_download(images, "日本", tmp_path)) as archive:
        assert archive.namelist() == ["image-0.png", "image-1.png"]
        with archive.open("image-1.png") as file:
            about = json.loads(Image.open(file).info["arimage"])
    assert about == {"version": __version__, "model": "m", "prompt": "x", "seed": 8}


def test_the_space_serves_the_same_demo(monkeypatch):
    started = []
    monkeypatch.setattr("arimage.app.demo.demo.serve_demo", lambda *arguments: started.append(arguments))
    monkeypatch.setattr("arimage.app.demo.demo.check_free", lambda *address: None)
    monkeypatch.setenv("ARIMAGE_MODELS", "emoji-var")
    runpy.run_path(str(Path(cli.__file__).parents[2] / "examples/space/app.py"), run_name="__main__")
    [(engine, host, port, auth, videos, root_path)] = started
    engine.close()
    # Everybody may use a Space, and it is not reached by the name of the machine.
    assert (list(engine.models), host, port, auth) == (["emoji-var"], "0.0.0.0", 7860, None)
    assert videos is root_path is None


@pytest.mark.slow
def test_the_documented_endpoints_work_with_the_default_models(monkeypatch):
    given = []
    monkeypatch.setattr("arimage.app.demo.demo.serve_demo", lambda *arguments: given.extend(arguments))
    monkeypatch.setattr("sys.argv", ["arimage", "app", "--device", "cpu", "--root-path", "/demo"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code in (0, None)
    engine, *_, videos, root_path = given
    assert len(engine.models) > 1 and videos.models and root_path == "/demo"
    documentation = (Path(cli.__file__).parents[2] / "docs/app.md").read_text(encoding="utf-8")
    [endpoints] = re.findall(r"The endpoints are (.+?)\.", documentation)
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "white").save(file, "PNG")
    arguments = {
        "generate": {"prompt": "a red heart", "seed": 1},
        "compare": {"prompt": "a red heart", "decodings": ["sjd-coupled", "sjd"], "seed": 1},
        "edit": {"prompt": "a red heart", "seed": 1},
    }
    with served(engine, None, videos) as url, visit(url) as client:
        for query in ("", "?all_endpoints=true"):
            named = client.get(f"/gradio_api/info{query}").json()["named_endpoints"]
            assert set(named) == set(re.findall("`(/.+?)`", endpoints)) == {f"/{name}" for name in arguments}
        assert {one["api_name"] for one in client.get("/config").json()["dependencies"]} == {None, *arguments}
        [path] = client.post("/gradio_api/upload", files={"files": ("white.png", file.getvalue())}).json()
        picture = {"path": path, "meta": {"_type": "gradio.FileData"}}
        arguments["edit"] |= {"image": picture, "mask_image": picture}
        for name, values in arguments.items():
            answer = client.post(f"/gradio_api/call/v2/{name}", json=values)
            events = client.get(f"/gradio_api/call/v2/{name}/{answer.json()['event_id']}").text
            assert "event: complete" in events and '"passes":' in events, name


@pytest.mark.slow
def test_the_command_serves_until_it_is_stopped(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"TMPDIR": str(tmp_path), "ARIMAGE_APP_AUTH": ":".join(AUTH)}
    command = [sys.executable, "-m", "arimage", "app", "--model", "emoji-var", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        url = process.stdout.readline().removeprefix("arimage is at ").strip()
        assert url == f"http://127.0.0.1:{port}/"
        assert httpx.get(f"{url}gradio_api/info").status_code == 401
        client = Client(url, auth=AUTH, verbose=False, download_files=False)
        shown, _ = client.predict("pizza", api_name="/generate")
        assert str(tmp_path) in shown[0]["image"]["path"]
        process.terminate()
        assert process.wait(30) == 0
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".png", ".zip", ".webp")]
