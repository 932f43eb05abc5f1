"""`arimage generate` with a model of videos, and the files that it reads and writes."""

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from pipelines.cosmos import tiny as tiny_cosmos

from arimage.cli import generate as generating
from arimage.media import files as media


SIZE = (64, 48)
needs_mp4 = pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="needs arimage[video]")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for kind in ("video", "text"):
        tiny_cosmos.pipeline(kind).save_pretrained(folder / kind)
    return folder


@pytest.fixture
def words(models):
    """The words of the command on a model."""
    return lambda *arguments, model="video": ["generate", *arguments, "--model", models / model, "--device", "cpu"]


@pytest.fixture
def generate(run, words):
    """Run the command on a model in an empty folder; returns what it printed."""

    def generate(*arguments, **options):
        code, out, err = run(*words(*arguments, **options))
        assert code == 0, err
        return out, err

    return generate


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "street.png"
    pixels = torch.randint(256, (48, 64, 3), generator=torch.Generator().manual_seed(0)).byte().numpy()
    Image.fromarray(pixels).save(path)
    return path


def frames_of(path):
    with Image.open(path) as file:
        return [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(file)]


@pytest.mark.every(2)
@pytest.mark.parametrize("suffix", [".webp", ".gif"])
def test_an_image_becomes_a_video(generate, picture, suffix, tmp_path):
    out, err = generate("--image", picture, "--out", f"out/street{suffix}", "--num-frames", 9)
    assert out.split() == [f"out/street{suffix}"] and "1 video, " in err
    frames = frames_of(tmp_path / "out" / f"street{suffix}")
    assert len(frames) == 9 and frames[0].shape == (48, 64, 3)


def test_a_video_is_continued_and_a_folder_holds_a_file_per_video(generate, picture, monkeypatch, tmp_path):
    monkeypatch.setattr(media, "can_write_mp4", lambda: False)
    generate("--image", picture, "--out", "first.webp")
    assert len(frames_of(tmp_path / "first.webp")) == 17
    with Image.open(tmp_path / "first.webp") as file:
        file.seek(1)
        file.load()
        assert file.info["duration"] == round(1000 / 24)
    out, _ = generate("--video", "first.webp", "-n", 2, "--out", "films")
    paths = out.split()
    assert paths[0] == "films/first-0.webp" and len(set(paths)) == 2
    assert len(frames_of(tmp_path / paths[1])) == 17


@needs_mp4
def test_mp4_files_are_written_and_read(generate, picture, tmp_path):
    generate("--image", picture, "--out", "film.mp4")
    frames = media.read_video("--video", tmp_path / "film.mp4")
    assert len(frames) == 17 and frames[0].size == SIZE
    assert generate("--video", "film.mp4", "--out", "films")[0].split() == ["films/film-0.mp4"]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x.png"], "generates videos: end it in one of .mp4"),
        (["--out", "x.gif", "--guidance-scale", 2], "guidance_scale is 2.0"),
        (["--out", "x.gif", "--num-frames", 16], "16 frames do not fit"),
        (["--out", "x.gif", "--mask-image", "street.png"], "takes no mask_image"),
        (["--out", "x.gif", "--video", "street.png"], "one of image, video and tokens"),
        (["--out", "x.gif", "--video", "none.gif"], "--video is none.gif, which cannot be read"),
        (["--out", "x.gif", "a red heart"], "reads no text"),
    ],
)
def test_wrong_options_are_refused(refused, words, picture, options, message, tmp_path):
    assert message in refused(*words("--image", picture, *options))
    assert not (tmp_path / "x.gif").exists()


def test_mp4_needs_its_extra(refused, words, picture, monkeypatch):
    monkeypatch.setattr(media, "can_write_mp4", lambda: False)
    monkeypatch.setattr(generating, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    for options in (["--image", picture, "--out", "x.mp4"], ["--video", "x.mp4"]):
        assert "x.mp4, which needs imageio: pip install 'arimage[video]'" in refused(*words(*options))


def test_an_image_model_takes_no_video(refused, picture, monkeypatch):
    monkeypatch.setattr(media, "can_write_mp4", lambda: True)
    for options, message in (
        (["--video", picture], "takes no video"),
        (["--num-frames", "9"], "takes no num_frames"),
        (["--out", "x.mp4"], "generates images"),
    ):
        assert message in refused("generate", "a red heart", *options)
