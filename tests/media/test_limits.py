"""Small files that ask for much work are refused before a decoder sees them."""

import contextlib
import io
import struct
import time
import zlib

import numpy as np
import pytest
import torch
from media import media_kit
from PIL import Image, ImageFile

from arimage.eval.bench.memory import peak_memory, reset_peak_memory
from arimage.media import limits
from arimage.media.files import open_image, read_image, read_video, to_rgb
from arimage.pipelines.lumina_dimoo.prompts import crop_picture
from arimage.pipelines.pictures.videos import cover_levels, prepare_images
from arimage.training.tokens.views import views_of


@contextlib.contextmanager
def at_most(mebibytes):
    """Memory of this process, where the system reports its peak."""
    reset_peak_memory(torch.device("cpu"))
    before = peak_memory(torch.device("cpu"))
    yield
    assert all(now - then < mebibytes for then, now in zip(before, peak_memory(torch.device("cpu")), strict=True))


def saved(format, size=(64, 64), **options):
    return media_kit.saved(Image.new("RGB", size, (200, 30, 30)), format, **options)


def with_scans(count):
    """A progressive JPEG whose last scan comes again and again."""
    whole = saved("JPEG", progressive=True)
    table = whole.rfind(b"\xff\xc4", 0, whole.rfind(b"\xff\xda"))
    return whole[:-2] + whole[table:-2] * count + whole[-2:]


def chunk(kind, body):
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_with(*chunks):
    whole = saved("PNG")
    return whole[:33] + b"".join(chunks) + whole[33:]


def greedy_exif(entries=5000, size=60_000):
    """EXIF data whose entries all have the same bytes as their value."""
    table = b"".join(struct.pack("<HHLL", tag, 7, size, 8) for tag in range(entries))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries) + table + b"\0" * 4


def segment(code, body):
    return bytes([0xFF, code]) + struct.pack(">H", len(body) + 2) + body


def jpeg_with(*segments):
    whole = saved("JPEG")
    return whole[:2] + b"".join(segments) + whole[2:]


ICCP = chunk(b"iCCP", b"x\0\0" + zlib.compress(b"\0" * 2**20))
GREEDY = {
    "scans": (with_scans(5000), "more than 64 scans"),
    "segments": (jpeg_with(segment(0xE5, b"") * 150_000), "more than 100000 parts"),
    "exif of jpeg": (jpeg_with(segment(0xE1, greedy_exif())), "EXIF"),
    "exif of jpeg in parts": (
        jpeg_with(segment(0xE1, greedy_exif()[:50_000]), segment(0xE1, b"Exif\0\0" + greedy_exif()[50_000:])),
        "EXIF",
    ),
    "exif of jpeg in many parts": (jpeg_with(segment(0xE1, b"Exif\0\0" + b"\0" * 70) * 90_000), "EXIF"),
    "exif after an end": (jpeg_with(b"\xff\xd9", segment(0xE1, greedy_exif())), "EXIF"),
    "index of several photos": (jpeg_with(segment(0xE2, b"MPF\0" + greedy_exif()[6:])), "EXIF"),
    "chunks": (png_with(chunk(b"abCd", b"") * 150_000), "more than 100000 parts"),
    "profiles": (png_with(*[ICCP] * 2000), "more than one colour profile"),
    "one large profile": (png_with(chunk(b"iCCP", b"x\0\0" + zlib.compress(b"\0" * 2**26))), "cannot be read"),
    "text": (png_with(*[chunk(b"zTXt", b"x\0\0" + zlib.compress(b"\0" * 2**20))] * 100), "cannot be read"),
    "exif of png": (png_with(chunk(b"eXIf", greedy_exif()[6:])), "EXIF"),
    "exif of webp": (saved("WEBP", exif=greedy_exif()), "EXIF"),
    "entries of tiff": (greedy_exif(50_000, 600_000)[6:], "EXIF"),
    "pixels": (
        saved("PNG", (1, 1))[:16] + struct.pack(">II", 60_000, 60_000) + saved("PNG", (1, 1))[24:],
        "cannot be read",
    ),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", GREEDY)
def test_a_small_file_that_asks_for_much_is_refused_at_once(kind):
    data, reason = GREEDY[kind]
    began = time.process_time()
    with at_most(150), pytest.raises(ValueError, match=f"^image .*{reason}"):
        to_rgb("image", open_image("image", io.BytesIO(data)))
    assert time.process_time() - began < 2


def test_text_of_exif_data_is_checked_too():
    text = "\nexif\n  1000\n" + greedy_exif().hex()
    body = b"Raw profile type exif\0\0" + zlib.compress(text.encode())
    with pytest.raises(ValueError, match="EXIF"):
        to_rgb("image", open_image("image", io.BytesIO(png_with(chunk(b"zTXt", body)))))


def test_more_pixels_than_pillow_calls_safe_are_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64)
    open_image("image", io.BytesIO(saved("PNG")))
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(ValueError, match="image has 64x65 pixels"):
        open_image("image", io.BytesIO(saved("PNG", (64, 65))))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    open_image("image", io.BytesIO(saved("PNG", (64, 65))))


COVER = {
    "frames": lambda image: prepare_images(image, (256, 256)),
    "levels of frames": lambda image: prepare_images(image, (256, 256), cover_levels),
    "views": lambda image: views_of(image, (256, 256), "ten-crop"),
    "pictures to edit": lambda image: crop_picture(image),
}


@pytest.mark.parametrize("kind", COVER)
def test_a_very_long_image_is_cropped_before_it_is_enlarged(kind):
    with at_most(300):
        for size in ((1, 20_000), (20_000, 1)):
            COVER[kind](Image.new("RGB", size))


def test_no_other_image_is_cropped_and_the_middle_stays():
    for given in ((480, 848), (480, 3000), (100, 800)):
        assert limits.shown_part(given, (64, 64)) == (slice(0, given[0]), slice(0, given[1]))
    # Stripes, whose middle shows whether it moved.
    image = Image.fromarray((np.arange(3 * 4001 * 3) // 9 % 7 * 40).astype(np.uint8).reshape(3, 4001, 3))
    expected = image.resize((4001 * 4, 12), Image.Resampling.BICUBIC).crop((2 * 4001 - 6, 0, 2 * 4001 + 6, 12))
    assert (views_of(image, (12, 12), "centre")[0].permute(1, 2, 0).numpy() == np.asarray(expected)).mean() > 0.9


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_frames_and_the_pixels_of_all_of_them_are_bounded(suffix, tmp_path, monkeypatch):
    frames = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in range(0, 250, 25)]
    frames[0].save(tmp_path / f"a{suffix}", save_all=True, append_images=frames[1:], duration=100)
    assert len(read_video("--video", tmp_path / f"a{suffix}")) == 10
    for name, most in (("MAX_FRAMES", 9), ("MAX_ANIMATED_PIXELS", 10 * 64 - 1)):
        with monkeypatch.context() as patch:
            patch.setattr(limits, name, most)
            with pytest.raises(ValueError, match="--video is .* has 10 frames of 8x8 pixels"):
                read_video("--video", tmp_path / f"a{suffix}")


def test_frames_that_are_shown_for_long_are_not_repeated_without_end(tmp_path):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], duration=[1, 60_000_000 // 4])
    with pytest.raises(ValueError, match="--video is .* frames of 8x8 pixels"):
        read_video("--video", tmp_path / "a.webp")


@pytest.mark.parametrize("format", ["EPS", "ICO", "PCX", "TGA", "PDF", "SGI", "JPEG2000"])
def test_formats_that_are_not_named_are_refused(format, tmp_path):
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png", format)
    with pytest.raises(ValueError, match="a.png, which cannot be read as an image"):
        read_image(tmp_path / "a.png")


PHOTOS = {
    "progressive": lambda: saved("JPEG", (256, 256), progressive=True, quality=95),
    "several scans": lambda: with_scans(20),
    "mpo": lambda: saved("MPO", save_all=True, append_images=[Image.new("RGB", (16, 16))]),
    "thumbnail and film": lambda: (
        jpeg_with(segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0\0\0" + with_scans(100)[:60_000])) + b"\xff\xda\0\2" * 5000
    ),
    "large": lambda: saved("PNG", (2000, 2000)),
    "tiff": lambda: saved("TIFF", (64, 2000)),
}


@pytest.mark.parametrize("kind", PHOTOS)
def test_whole_photos_are_read(kind):
    data = PHOTOS[kind]()
    assert to_rgb("image", open_image("image", io.BytesIO(data))).getpixel((5, 5))[0] > 190
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False
