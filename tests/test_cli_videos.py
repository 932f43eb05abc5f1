"""`arimage generate` with a model of videos, and the files that it reads and writes."""

import importlib.util

import numpy as np
import pytest
import torch
import typer
from PIL import Image, ImageSequence
from pipelines.cosmos import tiny as tiny_cosmos

from arimage.cli import main as cli
from arimage.cli.options import load_pipeline
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
def run(models, tmp_path, monkeypatch, capsys):
    """Run `arimage generate` with the model "video" or "text" in an empty folder; return what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, model="video"):
        command = ["generate", *map(str, arguments), "--model", str(models / model), "--device", "cpu"]
        typer.main.get_command(cli.app).main(command, standalone_mode=False)
        return capsys.readouterr()

    return run


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
def test_an_image_becomes_a_video(run, picture, suffix, tmp_path):
    printed = run("--image", picture, "--out", f"out/street{suffix}", "--num-frames", 9)
    assert printed.out.split() == [f"out/street{suffix}"] and "1 video, " in printed.err
    frames = frames_of(tmp_path / "out" / f"street{suffix}")
    assert len(frames) == 9 and frames[0].shape == (48, 64, 3)


def test_a_video_is_continued_and_a_folder_holds_a_file_per_video(run, picture, monkeypatch, tmp_path):
    monkeypatch.setattr(media, "can_write_mp4", lambda: False)
    run("--image", picture, "--out", "first.webp")
    assert len(frames_of(tmp_path / "first.webp")) == 17
    with Image.open(tmp_path / "first.webp") as file:
        file.seek(1)
        file.load()
        assert file.info["duration"] == round(1000 / 24)
    printed = run("--video", "first.webp", "-n", 2, "--out", "films")
    assert printed.out.split() == ["films/first-0-0.webp", "films/first-0-1.webp"]
    assert len(frames_of(tmp_path / "films" / "first-0-1.webp")) == 17


def test_a_text_says_what_happens_and_a_file_holds_a_grid(run, picture, tmp_path):
    run("a red heart", "a blue book", "--image", picture, "--out", "both.gif", model="text")
    frames = frames_of(tmp_path / "both.gif")
    assert len(frames) == 17 and frames[0].shape == (48, 128, 3)
    assert not np.array_equal(frames[-1][:, :64], frames[-1][:, 64:])


@pytest.mark.slow
def test_a_trace_and_an_acceptance_map_show_the_maps_side_by_side(run, picture, tmp_path):
    options = ("--trace", "trace.webp", "--trace", "map.png", "--decoding", "sjd-lazy:init=previous")
    run("--image", picture, "--out", "film.webp", *options)
    # Two maps of 48 x 64 pixels, enlarged to a height of at least 384 pixels.
    assert len(frames_of(tmp_path / "trace.webp")) > 3 and frames_of(tmp_path / "trace.webp")[0].shape[1] > 2 * 8 * 64
    with Image.open(tmp_path / "map.png") as picture:
        assert picture.width > 4 * 8 * 64


def test_a_video_is_continued_at_the_rate_of_the_model(run, tmp_path, monkeypatch):
    read, found = media.read_video, []
    monkeypatch.setattr(media, "read_video", lambda *given, **named: found.append(read(*given, **named)) or found[-1])
    # The model generates 24 frames per second.
    frames = [Image.new("RGB", SIZE, (6 * number, 0, 0)) for number in range(40)]
    media.write_video(frames, tmp_path / "fast.webp", 48)
    run("--video", "fast.webp", "--out", "film.webp")
    assert len(found[-1]) == 20 and len(found[0]) == 1
    # A .webp rounds 20.8 ms to 21.
    shown = np.array([np.asarray(frame)[..., 0].mean() / 6 for frame in found[-1]])
    assert np.abs(shown - np.arange(0.5, 40, 2)).max() < 0.7


@needs_mp4
def test_mp4_files_are_written_and_read(run, picture, tmp_path):
    run("--image", picture, "--out", "film.mp4")
    frames = media.read_video("--video", tmp_path / "film.mp4")
    assert len(frames) == 17 and frames[0].size == SIZE
    assert run("--video", "film.mp4", "--out", "films").out.split() == ["films/film-0-0.mp4"]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--out", "x.png"], "x.png, but .* generates videos: end it in one of .mp4"),
        (["--out", "x.gif", "--guidance-scale", 2], "guidance_scale is 2.0, but this checkpoint was trained without"),
        (["--out", "x.gif", "--num-frames", 16], "16 frames do not fit"),
        (["--out", "x.gif", "--mask-image", "street.png"], "takes no mask_image"),
        (["--out", "x.gif", "--video", "street.png"], "one of image, video and tokens"),
        (["--out", "x.gif", "--video", "none.gif"], "--video is none.gif, which cannot be read"),
        (["--out", "x.gif", "a red heart"], "reads no text"),
    ],
)
def test_wrong_options_are_refused(run, picture, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run("--image", picture, *options)
    assert not (tmp_path / "x.gif").exists()


def test_mp4_needs_its_extra(run, picture, monkeypatch):
    monkeypatch.setattr(media, "can_write_mp4", lambda: False)
    monkeypatch.setattr(cli, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    for options in (["--image", picture, "--out", "x.mp4"], ["--video", "x.mp4"]):
        with pytest.raises(ValueError, match=r"x.mp4, which needs imageio: pip install 'arimage\[video\]'"):
            run(*options)


def test_commands_of_images_refuse_models_of_videos(models):
    with pytest.raises(ValueError, match="generates videos, which this command does not take: use `arimage generate`"):
        load_pipeline(str(models / "video"), "cpu")


def test_an_image_model_takes_no_video(models, picture, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(cli.app)
    for options in (["--video", str(picture)], ["--num-frames", "9"], ["--out", "x.mp4"]):
        monkeypatch.setattr(media, "can_write_mp4", lambda: True)
        with pytest.raises(ValueError, match="takes no video|takes no num_frames|generates images"):
            command.main(["generate", "a red heart", *options], standalone_mode=False)
