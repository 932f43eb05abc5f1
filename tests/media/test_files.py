"""Images, masks and videos from files: what viewers show, whatever the format stores."""

import io
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from media.media_kit import reopened, saved
from PIL import Image, ImageDraw

from arimage.media import files
from arimage.media.files import (
    can_write_mp4,
    open_image,
    read_clip,
    read_image,
    read_video,
    to_mask,
    to_rgb,
    to_rgba,
    transparent_part,
)
from arimage.media.texts import read_text
from arimage.media.writing import write_grid, write_video


needs_mp4 = pytest.mark.skipif(not can_write_mp4(), reason="needs arimage[video]")
RAMP = np.tile(np.arange(0, 256, 8, dtype=np.uint8), (8, 1))
LOWER = np.zeros((8, 8), bool)
LOWER[4:] = True


def same(image, expected, tolerance=0):
    found = np.asarray(to_rgb("image", image)).astype(int)
    assert np.abs(found - np.asarray(expected)).max() <= tolerance


GREY = np.repeat(RAMP[..., None], 3, 2)
WIDE = {
    "I;16": Image.fromarray(RAMP.astype(np.uint16) * 257),
    "I;16B": Image.fromarray((RAMP.astype(np.uint16) * 257).astype(">u2")),
    "I": Image.fromarray(RAMP.astype(np.int32) * 257),
    "F": Image.fromarray(RAMP / np.float32(255)),
}


@pytest.mark.parametrize("mode", WIDE)
def test_levels_of_other_ranges_are_scaled(mode):
    assert WIDE[mode].mode == mode
    same(WIDE[mode], GREY)
    if mode == "I;16":
        for format in ("PNG", "TIFF", "PPM"):
            same(reopened(WIDE[mode], format), GREY)
        # The level 0 is transparent.
        same(reopened(WIDE[mode], transparency=0), np.where(GREY == 0, 255, GREY))


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.fromarray(RAMP.astype(np.float32)), "levels from 0 to 248 where mode F means floats in .0, 1.: scale"),
        (Image.fromarray(np.float32([[0.5, np.nan]])), "levels from nan to nan where mode F"),
        (Image.fromarray(RAMP.astype(np.int32)), "levels from 0 to 248 where mode I means levels of 16 bits"),
        (Image.fromarray(np.int32([[-5, 7000]])), "levels from -5 to 7000"),
    ],
)
def test_unclear_levels_are_refused(image, message):
    with pytest.raises(ValueError, match=f"^image has {message}"):
        to_rgb("image", image)


def sticker(hidden):
    """A red square with soft edges; what is transparent has a colour that nobody sees."""
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[..., :3] = hidden
    pixels[2:6, 2:6] = (220, 20, 20, 255)
    pixels[1, 2:6] = (220, 20, 20, 128)
    return Image.fromarray(pixels)


def test_transparent_parts_are_put_on_white():
    expected = np.full((8, 8, 3), 255)
    expected[2:6, 2:6] = (220, 20, 20)
    expected[1, 2:6] = (237, 137, 137)
    for hidden in ((0, 0, 0), (255, 255, 255), (9, 99, 199)):
        same(sticker(hidden), expected, 1)
        same(reopened(sticker(hidden)), expected, 1)
        same(reopened(sticker(hidden), "WEBP", lossless=True, exact=True), expected, 1)
        same(sticker(hidden).convert("RGBa"), expected, 2)


@pytest.mark.parametrize("form", ["LA", "La", "PA", "P", "P with one colour", "L", "RGB", "1"])
def test_every_form_of_transparency_is_put_on_white(form):
    alpha = Image.fromarray(np.where(LOWER, 255, 0).astype(np.uint8))
    grey = Image.new("L", (8, 8), 0)
    grey.paste(90, (0, 4, 8, 8))
    image = grey.copy()
    image.putalpha(alpha)
    if form == "La":
        image = image.convert("La")
    elif form == "PA":
        image = grey.convert("P")
        image.putalpha(alpha)
        assert image.mode == "PA"
    elif form == "P":
        image = reopened(grey.convert("P"), transparency=bytes([0] + [255] * 255))
    elif form == "P with one colour":
        image = reopened(grey.convert("P"), "GIF", transparency=0)
    elif form in ("L", "RGB"):
        image = reopened(grey.convert(form), transparency=0 if form == "L" else (0, 0, 0))
    elif form == "1":
        image = reopened(Image.fromarray(LOWER), transparency=0)
    expected = np.full((8, 8, 3), 255)
    expected[4:] = 255 if form == "1" else 90
    same(image, expected, 2)


TURNS = {
    1: lambda a: a,
    3: lambda a: np.rot90(a, 2),
    6: np.rot90,
    8: lambda a: np.rot90(a, -1),
    2: np.fliplr,
    4: np.flipud,
}


@pytest.mark.parametrize("format", ["JPEG", "MPO", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", TURNS)
def test_photos_are_shown_upright(format, orientation):
    shown = np.full((8, 16, 3), 255, np.uint8)
    shown[:4] = (255, 0, 0)
    shown[:, :8] //= 2
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 100, "lossless": True} if format == "WEBP" else {"quality": 100, "subsampling": 0}
    if format == "MPO":
        options |= {"save_all": True, "append_images": [Image.new("RGB", (16, 8))]}
    photo = reopened(
        Image.fromarray(TURNS[orientation](shown).copy()),
        format,
        exif=exif,
        **({} if format in ("PNG", "TIFF") else options),
    )
    same(photo, shown, 6)
    # Nothing is turned twice.
    same(to_rgb("image", photo), shown, 6)
    same(to_rgba("image", photo), shown, 6)


# Masks


def white_paint(colour, paint=LOWER):
    return Image.fromarray(np.dstack([np.full((8, 8, 3), colour, np.uint8), np.where(paint, 255, 0).astype(np.uint8)]))


def dark_palette(labels):
    image = Image.fromarray(labels.astype(np.uint8), "L").convert("P")
    image.putdata(labels.astype(np.uint8).ravel().tolist())
    image.putpalette([0, 0, 0, 128, 0, 0])
    return image


def turned(mask):
    exif = Image.Exif()
    exif[0x0112] = 6
    return reopened(Image.fromarray(np.rot90(np.asarray(mask)).copy()), exif=exif)


LEVELS = np.where(LOWER, 255, 0).astype(np.uint8)
MASKS = {
    "L": Image.fromarray(LEVELS),
    "1": Image.fromarray(LOWER),
    "RGB": Image.fromarray(LEVELS).convert("RGB"),
    "black first in the palette": Image.fromarray(LEVELS).convert("RGB").quantize(2),
    "opaque RGBA": Image.fromarray(LEVELS).convert("RGBA"),
    "16 bits": Image.fromarray(LEVELS.astype(np.uint16) * 257),
    "floats": Image.fromarray(LOWER.astype(np.float32)),
    "labels": Image.fromarray(LOWER.astype(np.uint8)),
    "labels of 32 bits": Image.fromarray(LOWER.astype(np.int32)),
    "labels of a dark palette": dark_palette(LOWER),
    "white paint": white_paint(255),
    "yellow paint": white_paint((255, 240, 200)),
    "white paint, LA": white_paint(255).convert("LA"),
    "white paint, premultiplied": white_paint(255).convert("RGBa"),
    "black with a hole": white_paint(0, ~LOWER),
    "a palette with a transparent colour": reopened(Image.fromarray(LEVELS).convert("P"), transparency=0),
    "turned": turned(Image.fromarray(LEVELS)),
}


@pytest.mark.parametrize("form", MASKS)
def test_masks_select_what_they_show(form):
    mask = to_mask("mask_image", MASKS[form])
    assert mask.mode == "L" and np.array_equal(np.asarray(mask) >= 128, LOWER)
    assert np.array_equal(np.asarray(to_mask("mask_image", mask)) >= 128, LOWER)


def test_soft_edges_of_paint_stay_soft():
    paint = Image.fromarray(np.uint8([[[255, 255, 255, alpha] for alpha in (0, 100, 200)]]))
    assert np.asarray(to_mask("mask_image", paint)).tolist() == [[0, 100, 200]]


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (8, 8)), "selects nothing: make it white where"),
        (Image.new("RGB", (8, 8), (100, 100, 100)), "selects nothing"),
        (Image.new("RGBA", (8, 8), "black"), "selects nothing"),
        (Image.fromarray(np.where(LOWER, 2, 0).astype(np.uint8)), "selects nothing"),
        (Image.new("RGBA", (8, 8), (255, 255, 255, 0)), "is transparent in part, and what is left is neither"),
        (Image.fromarray(LEVELS.astype(np.float32)), "has levels from 0 to 255 where mode F means floats"),
    ],
)
def test_masks_that_select_nothing_or_are_unclear_are_refused(mask, message):
    with pytest.raises(ValueError, match=f"^mask_image {message}"):
        to_mask("mask_image", mask)


def test_the_transparent_part_of_an_image_is_a_mask():
    assert np.array_equal(np.asarray(transparent_part("image", white_paint(30, ~LOWER))) == 255, LOWER)
    for image in (Image.new("RGB", (8, 8)), Image.new("RGBA", (8, 8), (1, 2, 3, 200))):
        with pytest.raises(ValueError, match="^image has no transparency: make it"):
            transparent_part("image", image)


# Damaged files


def noise(mode="RGB", seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (24, 32, 4), dtype=np.uint8)).convert(mode)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF"])
@pytest.mark.parametrize("share", [0, 0.02, 0.5, 0.9])
def test_damaged_images_are_named(format, share, tmp_path):
    data = saved(noise(), format)
    data, path = data[: int(len(data) * share)], tmp_path / f"cut.{format.lower()}"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"^one of .* {path}, .*cannot be read") as caught:
        read_image(path)
    assert len(str(caught.value)) < len(str(path)) + 200 and "\n" not in str(caught.value)
    if format == "PNG" and share == 0.5:
        # Opened before, and so damaged where its pixels are.
        with pytest.raises(ValueError, match="^image cannot be read"):
            to_rgb("image", Image.open(io.BytesIO(data)))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_what_has_no_end_is_refused_before_it_is_read(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "large.png").touch()
    os.truncate(tmp_path / "large.png", 2**40)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("it was read"))
    for path, message in (
        (Path("/dev/zero"), "is a pipe or a device: give a file"),
        (tmp_path / "pipe.png", "is a pipe or a device: give a file"),
        (tmp_path / "large.png", "has 1099511627776 bytes, more than"),
    ):
        with pytest.raises(ValueError, match=f"^--image is {path}, which {message}"):
            open_image(f"--image is {path}, which", path)
        with pytest.raises(ValueError, match=f"^--video is {path}, which"):
            read_video("--video", path)
        with pytest.raises(ValueError, match=f"^--validation-prompts is {path}, which {message}"):
            read_text(path, f"--validation-prompts is {path}, which")


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_damaged_animations_are_named(format, tmp_path):
    frames = [noise(seed=seed) for seed in range(4)]
    data = saved(frames[0], format, save_all=True, append_images=frames[1:], duration=100)
    path = tmp_path / f"cut.{format.lower()}"
    for share in (0.3, 0.6, 0.9):
        path.write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ValueError, match=f"^--video is {path}, which cannot be read"):
            read_video("--video", path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\0\0\0\x20ftypisom" + b"\0" * 500])
def test_damaged_videos_are_named_in_one_sentence(content, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "cut.mp4"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^--video is {path}, which cannot be read") as caught:
        read_video("--video", path)
    assert len(str(caught.value)) < len(str(path)) + 150 and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="No such file"):
        read_video("--video", tmp_path / "none.mp4")


# Videos


def square(x):
    image = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(image).rectangle((x, 20, x + 20, 40), fill=(220, 20, 20))
    return image


def shown(frames):
    return [np.asarray(frame).astype(int) for frame in frames]


@pytest.mark.parametrize("suffix", [".webp", ".gif"])
@pytest.mark.parametrize("fps", [1, 7, 24, 60, 100])
@pytest.mark.parametrize("places", [[4] * 6 + [9, 14, 19, 24], [4] * 10, [4, 4, 9, 9, 14, 14], [4]])
def test_equal_frames_are_read_as_often_as_they_were_written(suffix, fps, places, tmp_path):
    write_video([square(x) for x in places], tmp_path / f"film{suffix}", fps)
    frames = read_video("--video", tmp_path / f"film{suffix}")
    assert len(frames) == len(places)
    for frame, x in zip(shown(frames), places, strict=True):
        assert np.abs(frame - np.asarray(square(x))).mean() < 6


@pytest.mark.parametrize(
    ("format", "durations", "expected"),
    [
        ("GIF", [750, 125, 125, 125], [6, 1, 1, 1]),
        ("WEBP", [750, 125, 125], [6, 1, 1]),
        ("WEBP", [375, 375, 500], [3, 3, 4]),
        ("WEBP", [42, 41, 42, 83], [1, 1, 1, 2]),
        ("PNG", [125, 250, 125], [1, 2, 1]),
        ("PNG", [0, 0, 0], [1, 1, 1]),
        ("GIF", [0, 100, 0, 300], [1, 1, 1, 3]),
        ("GIF", [100, 100, 110], [1, 1, 1]),
        ("WEBP", [100, 137, 100], [1, 1, 1]),
    ],
)
def test_frames_of_other_files_are_repeated_by_their_durations(format, durations, expected, tmp_path):
    path = tmp_path / f"film.{format.lower()}"
    frames = [square(5 * i) for i in range(len(durations))]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, lossless=True)
    found = shown(read_video("--video", path))
    lengths = [sum(np.abs(one - np.asarray(frame)).mean() < 1 for one in found) for frame in frames]
    assert lengths == expected and len(found) == sum(expected)
    # Of a run, whose frames have no durations.
    frames[0].save(path, "PNG", save_all=True, append_images=[frames[0], frames[1]])
    assert len(read_video("--video", path)) == 3


@pytest.mark.parametrize("format", ["WEBP", "PNG", "GIF"])
def test_transparent_frames_are_put_on_white(format, tmp_path):
    frames = [sticker((0, 0, 0)), sticker((0, 0, 0)).rotate(90), sticker((0, 0, 0))]
    if format == "GIF":
        frames = [frame.convert("RGB").quantize(4) for frame in frames]
        for frame in frames:
            frame.info["transparency"] = frame.getpixel((0, 0))
    path = tmp_path / f"a.{format.lower()}"
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, lossless=True, disposal=2)
    found = shown(read_video("--video", path))
    assert len(found) == 3 and all((frame[0] == 255).all() and (frame[:, 0] == 255).all() for frame in found)
    assert all(np.abs(frame[3:5, 3:5] - (220, 20, 20)).max() < 12 for frame in found)


@pytest.mark.parametrize(("base", "expected"), [((0, 0, 0, 0), (255, 127, 127)), ((0, 0, 255, 255), (128, 0, 127))])
@pytest.mark.parametrize("disposal", [0, 1, 2])
def test_frames_of_a_png_that_are_transparent_in_part_cover_those_before(base, expected, disposal, tmp_path):
    layers = [Image.new("RGBA", (8, 8), (255, 0, 0, 128)), Image.new("RGBA", (8, 8))]
    first = Image.new("RGBA", (8, 8), base)
    first.save(
        tmp_path / "a.png", save_all=True, append_images=layers, blend=1, disposal=[0, disposal, 0], duration=100
    )
    frames = shown(read_video("--video", tmp_path / "a.png"))
    below = np.asarray(to_rgb("image", first))[0, 0]
    after = {0: expected, 1: (255, 255, 255), 2: below}[disposal]
    assert np.abs(frames[1] - expected).max() <= 1 and np.abs(frames[2] - after).max() <= 1


def test_the_still_image_of_an_animated_png_is_no_frame(tmp_path):
    square(0).save(
        tmp_path / "a.png", save_all=True, default_image=True, append_images=[square(9), square(14)], duration=100
    )
    frames = shown(read_video("--video", tmp_path / "a.png"))
    assert len(frames) == 2 and np.array_equal(frames[0], np.asarray(square(9)))


def test_animations_are_turned_as_their_exif_data_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [square(x).transpose(Image.Transpose.ROTATE_90) for x in (4, 9)]
    for suffix in (".webp", ".png"):
        path = tmp_path / f"a{suffix}"
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, exif=exif, lossless=True)
        assert np.array_equal(shown(read_video("--video", path)), shown([square(4), square(9)]))


@needs_mp4
def test_a_video_has_the_colours_that_it_was_written_with(tmp_path):
    blocks = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8).repeat(16, 1).repeat(16, 2)
    rows, columns = np.mgrid[:128, :128] / 127
    smooth = np.stack([rows, columns, (rows + columns) / 2], -1)[None] * np.linspace(90, 250, 4)[:, None, None, None]
    for first in (blocks, smooth.round().astype(np.uint8)):
        frames = [Image.fromarray(frame) for frame in first]
        for _ in range(5):
            write_video(frames, tmp_path / "film.mp4", 8)
            frames = read_video("--video", tmp_path / "film.mp4")
            # Not at edges of blocks, where the codec errs.
            error = (np.stack(shown(frames)) - first)[:, 8::16, 8::16]
            assert abs(error.mean()) < 0.3 and (abs(error.mean((0, 1, 2))) < 0.5).all()


TIMES = [0, 3, 6, 8, 9, 12, 20, 21, 22, 23, 30, 45, 46, 47, 48, 60, 61, 62, 75, 89]


@needs_mp4
def test_videos_of_variable_rate_are_read_by_their_time_stamps(tmp_path):
    from imageio_ffmpeg import get_ffmpeg_exe

    frames = b"".join(np.full((64, 64, 3), 12 * number, np.uint8).tobytes() for number in range(len(TIMES)))
    stamps = "+".join(f"eq(N,{number})*{time}" for number, time in enumerate(TIMES))
    command = [get_ffmpeg_exe(), *"-v error -f rawvideo -pix_fmt rgb24 -s 64x64 -r 30 -i - -vf".split()]
    command += [f"settb=1/30,setpts='{stamps}'", *"-fps_mode passthrough -enc_time_base 1/30 -pix_fmt yuv420p".split()]
    subprocess.run([*command, tmp_path / "film.mp4"], input=frames, check=True, stderr=subprocess.DEVNULL)
    for rate, count in ((8, 16), (30, 90)):
        clip = read_clip("video", tmp_path / "film.mp4", count, rate)
        middle = [30 * (number + 0.5) / rate for number in range(count)]
        expected = [max(n for n, time in enumerate(TIMES) if time <= moment) for moment in middle]
        assert [round(float(frame.mean()) / 12) for frame in shown(clip)] == expected


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animations_of_variable_rate_are_read_by_their_durations(format, tmp_path):
    durations = [100, 70, 250, 40, 500, 30]
    frames = [Image.new("RGB", (16, 16), (40 * number, 0, 0)) for number in range(len(durations))]
    path = tmp_path / f"film.{format.lower()}"
    frames[0].save(path, format, save_all=True, append_images=frames[1:], duration=durations, lossless=True)
    ends = np.cumsum(durations)
    for rate in (8, 24):
        middles = (np.arange(int(ends[-1] * rate / 1000)) + 0.5) * 1000 / rate
        expected = [int(np.searchsorted(ends, middle, "right")) for middle in middles]
        found = [
            round(float(frame[..., 0].mean()) / 40) for frame in shown(read_clip("video", path, len(expected), rate))
        ]
        assert found == expected


@needs_mp4
@pytest.mark.parametrize("suffix", [".mp4", ".webp"])
def test_a_video_is_read_at_the_rate_that_is_asked_for(suffix, tmp_path):
    write_video([Image.new("L", (32, 32), 8 * number) for number in range(30)], tmp_path / f"film{suffix}", 30)

    def levels(*arguments):
        return [
            round(float(frame.mean()) / 8) for frame in shown(read_video("", tmp_path / f"film{suffix}", *arguments))
        ]

    assert levels() == list(range(30)) and levels(30) == list(range(30)) and levels(None, 3) == [0, 1, 2]
    assert levels(10) == [1, 4, 7, 10, 13, 16, 19, 22, 25, 28]
    assert levels(10, 2) == [1, 4] and len(levels(60)) in (59, 60)


@needs_mp4
def test_a_video_that_is_not_written_whole_is_an_error_and_leaves_what_was_there(tmp_path):
    path, frames = tmp_path / "film.mp4", [square(x) for x in range(9)]
    write_video(frames, path, 8)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(OSError, match="film.mp4 cannot be written .*make room"):
            write_video(frames, path, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


INTERRUPTED = """
import os, signal
from PIL import Image
from arimage.media import writing

class Frame:
    # Ctrl-C, which a terminal sends to all processes of a group, in the middle of the video.
    size = (64, 64)
    def convert(self, mode):
        os.killpg(os.getpgrp(), signal.SIGINT)
        return Image.new(mode, self.size)

signal.signal(signal.SIGINT, lambda *_: None)
writing.write_video([Frame()] * 9, writing.Path("film.mp4"), 8)
"""


@needs_mp4
@pytest.mark.slow
def test_a_signal_to_all_processes_does_not_end_the_writing_of_a_video(tmp_path):
    subprocess.run([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, start_new_session=True, check=True, timeout=60)
    assert len(read_video("--video", tmp_path / "film.mp4")) == 9


@needs_mp4
def test_a_video_with_too_many_pixels_is_refused(tmp_path, monkeypatch):
    write_video([square(x) for x in range(9)], tmp_path / "film.mp4", 8)
    monkeypatch.setattr(files, "MAX_VIDEO_PIXELS", 9 * 64 * 64)
    assert len(read_video("--video", tmp_path / "film.mp4")) == 9
    monkeypatch.setattr(files, "MAX_VIDEO_PIXELS", 9 * 64 * 64 - 1)
    with pytest.raises(ValueError, match="--video is .* 8 frames of 64x64 .*: give a shorter"):
        read_video("--video", tmp_path / "film.mp4")


# Writing


@pytest.mark.parametrize("suffix", [".png", ".webp", ".gif"])
def test_a_file_is_replaced_whole_or_not_at_all(suffix, tmp_path, monkeypatch):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"before")

    def write():
        images = [square(4), square(9)]
        write_grid([images, images] if suffix != ".png" else images, 2, path, None if suffix == ".png" else 8)

    save = Image.Image.save
    with monkeypatch.context() as patch:

        def fail(image, file, **options):
            save(image, file, **options)
            raise OSError("no space left")

        patch.setattr(Image.Image, "save", fail)
        with pytest.raises(OSError, match="no space"):
            write()
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"before"]
    write()
    (written,) = tmp_path.iterdir()
    assert written == path and "icc_profile" not in Image.open(path).info
