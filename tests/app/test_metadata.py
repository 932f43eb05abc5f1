"""Pictures and videos of the server and the demo say how they were made, in the form of `arimage generate`."""

import io
from pathlib import Path

import pytest
from app.server.server_kit import picture, wait_for
from PIL import Image
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.llamagen import tiny as tiny_llamagen
from starlette.testclient import TestClient
from typer.testing import CliRunner

from arimage import __version__
from arimage.app.demo.pictures import png
from arimage.app.engine.engine import Engine
from arimage.app.engine.models import load_models
from arimage.app.engine.types import Limits, Request
from arimage.app.engine.videos import VideoMaker, VideoRequest
from arimage.app.server.app import build_server
from arimage.app.server.video_jobs import VideoJobs
from arimage.cli import main as cli
from arimage.media.files import can_write_mp4, read_metadata
from arimage.media.metadata import from_text


ASKED = {"prompt": "a red heart", "model": "text", "n": 2, "seed": 7, "top_k": 9, "decoding": "sjd:window=8"}


@pytest.fixture(scope="module")
def pipelines():
    return {"text": tiny_llamagen.text_pipeline()}


@pytest.fixture
def serving(pipelines):
    """Clients of servers with these limits."""
    engines = []

    def serving(**limits):
        engines.append(Engine(pipelines, Limits(**limits)))
        return TestClient(build_server(engines[-1]), base_url="http://127.0.0.1")

    yield serving
    for engine in engines:
        engine.close()


def generated(client, **fields):
    answer = client.post("/v1/images/generations", json=ASKED | fields)
    assert answer.status_code == 200, answer.text
    return [picture(one["b64_json"]) for one in answer.json()["data"]], answer.json()["arimage"]


def found_in(tmp_path, image):
    path = tmp_path / "x"
    image.fp.seek(0)
    path.write_bytes(image.fp.read())
    return read_metadata("x", path)


def commanded(*arguments):
    """The files that `arimage generate` writes."""
    result = CliRunner().invoke(cli.app, ["generate", *map(str, arguments), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return [Path(line) for line in result.stdout.splitlines()]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "int8"])
def test_command_server_and_demo_write_one_form(tmp_path, monkeypatch, dtype):
    monkeypatch.chdir(tmp_path)
    tiny_llamagen.text_pipeline().save_pretrained("text")
    options = ["--seed", 7, "-n", 2, "--top-k", 9, "--decoding", "sjd:window=8", "--dtype", dtype]
    files = commanded("a red heart", "--model", tmp_path / "text", *options, "--out", "all")
    engine = Engine(load_models(["./text"], "cpu", dtype))
    sent, _ = generated(TestClient(build_server(engine), base_url="http://127.0.0.1"))
    shown = engine.submit(Request(count=2, **{name: ASKED[name] for name in ASKED if name != "n"})).result(60).images
    engine.close()
    expected = [read_metadata("x", file) for file in files]
    assert expected[0].batch_size == 2 and (dtype == "auto" or expected[0].dtype == dtype)
    for images in (sent, [picture(png(image)) for image in shown]):
        assert [found_in(tmp_path, image) for image in images] == expected
    # The copies of one image in a batch are rounded as the batch was.
    (again,) = commanded("--from", "x", "--out", "again.png")
    assert Image.open(again).tobytes() == sent[-1].tobytes()


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_each_picture_holds_what_makes_it_again(serving, tmp_path, format):
    client = serving()
    shown, facts = generated(client, output_format=format)
    for image, seed in zip(shown, facts["seeds"], strict=True):
        made = found_in(tmp_path, image)
        asked = {name: getattr(made, name) for name in ("prompt", "model", "seed", "top_k", "decoding")}
        assert asked == {name: ASKED[name] for name in asked} | {"seed": seed} and made.version == __version__
        [again], _ = generated(client, **asked, n=1, output_format=format)
        assert again.tobytes() == image.tobytes()


def test_a_server_may_leave_it_out(serving):
    shown, _ = generated(serving(metadata=False))
    assert all(image.info == {} for image in shown)


def test_an_edit_says_that_it_is_one(serving, tmp_path):
    data = io.BytesIO()
    Image.new("RGBA", (8, 8)).save(data, "PNG")
    answer = serving().post("/v1/images/edits", data={"prompt": "tree"}, files={"image": data.getvalue()})
    assert found_in(tmp_path, picture(answer.json()["data"][0]["b64_json"])).made_from == ["image", "mask_image"]


@pytest.mark.skipif(not can_write_mp4(), reason="the extra `video` is not installed")
@pytest.mark.parametrize("kept", [True, False])
def test_a_video_holds_what_makes_it_again(kept):
    film = tiny_cosmos.pipeline("text", begins_with_text=True)
    maker = VideoMaker({"film": film}, Limits(metadata=kept), ["/home/someone/style.safetensors:0.5"])
    jobs = VideoJobs(maker)
    job = jobs.add(VideoRequest("film", "a red heart", seed=5), "")
    wait_for(lambda: not job.unfinished)
    if kept:
        made = read_metadata("x", job.files["video"])
        assert made.dtype == "float32" and made.guidance_scale == film.generation_config["guidance_scale"]
        assert (made.prompt, made.model, made.seed, made.num_frames) == ("a red heart", "film", 5, job.frames)
        assert made.lora == ["style.safetensors:0.5"]
    else:
        with pytest.raises(ValueError, match="does not say"):
            read_metadata("x", job.files["video"])
    jobs.close()


def test_command_and_demo_write_one_form_of_videos(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_cosmos.pipeline("text", begins_with_text=True).save_pretrained("film")
    (file,) = commanded("a red heart", "--model", tmp_path / "film", "--seed", 5, "--out", "x.webp")
    *_, last = VideoMaker(load_models(["./film"], "cpu", videos=True)).run(VideoRequest("film", "a red heart", seed=5))
    assert from_text("x", last.note) == read_metadata("x", file)
