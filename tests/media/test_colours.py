"""Colours of files become sRGB, as viewers show them, wherever an image enters."""

import io
import struct
import time
import zlib

import numpy as np
import pytest
from media.media_kit import reopened, saved
from PIL import Image
from profiles import GREY, INKS, SLOW, SRGB_PRIMARIES, WIDE, WIDE_PRIMARIES, as_shown, gamma, matrix

from arimage.media.files import read_image, read_video, to_levels, to_mask, to_rgb, to_rgba, transparent_part


NOISE = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
COLOURS = Image.fromarray(NOISE)


def same(image, expected, tolerance=1):
    assert image.mode == "RGB" and not image.info
    assert np.abs(np.asarray(image, np.int16) - np.asarray(expected, np.int16)).max() <= tolerance


@pytest.mark.parametrize(
    ("format", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("TIFF", {}, 0),
        ("WEBP", {"lossless": True}, 0),
        ("JPEG", {"quality": 100, "subsampling": 0}, 0),
        ("AVIF", {"quality": 100, "subsampling": "4:4:4"}, 0),
    ],
)
def test_colours_of_a_profile_become_srgb(format, options, tolerance):
    photo = reopened(COLOURS, format, icc_profile=WIDE, **options)
    expected = as_shown(photo.convert("RGB"), WIDE)
    assert np.abs(np.asarray(expected, np.int16) - NOISE).max() > 20
    same(to_rgb("image", photo), expected, tolerance)
    # Nothing is converted twice.
    same(to_rgb("image", to_rgba("image", photo)), expected, tolerance)
    same(to_rgb("image", to_rgb("image", photo)), expected, tolerance)
    # One that its user opened and converted has its profile still.
    if not tolerance and format == "PNG":
        same(to_rgb("image", photo.convert("RGB").resize((8, 8))), as_shown(COLOURS.resize((8, 8)), WIDE))


@pytest.mark.parametrize("mode", ["L", "LA", "1", "I;16"])
def test_grey_images_have_profiles_of_their_own_or_of_colours(mode):
    grey = COLOURS.convert("L")
    image = grey.convert(mode) if mode != "I;16" else Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    photo = reopened(image, icc_profile=GREY)
    same(to_rgb("image", photo), as_shown(image.convert("L") if mode != "I;16" else grey, GREY))
    if mode == "L":
        photo = reopened(grey, "JPEG", quality=100, icc_profile=WIDE)
        same(to_rgb("image", photo), as_shown(grey.convert("RGB"), WIDE), 2)


def test_inks_are_those_of_their_profile():
    inks = Image.fromarray(np.dstack([NOISE, NOISE[..., 0]]), "CMYK")
    photo = reopened(inks, "TIFF", icc_profile=INKS)
    assert photo.mode == "CMYK"
    expected = as_shown(inks, INKS)
    assert np.abs(np.asarray(expected, np.int16) - np.asarray(inks.convert("RGB"))).max() > 20
    same(to_rgb("image", photo), expected)
    same(to_rgb("image", reopened(inks, "TIFF")), inks.convert("RGB"), 0)
    same(to_rgb("image", Image.new("LAB", (4, 4), (255, 128, 128))), np.full((4, 4, 3), 255))


def test_transparency_is_kept_and_put_on_white_after_the_conversion():
    alpha = Image.fromarray(NOISE[..., 0])
    image = COLOURS.copy()
    image.putalpha(alpha)
    photo = reopened(image, icc_profile=WIDE)
    shown = to_rgba("image", photo)
    assert np.array_equal(shown.getchannel("A"), alpha)
    same(shown.convert("RGB"), as_shown(COLOURS, WIDE))
    white = Image.new("RGBA", image.size, "white")
    same(to_rgb("image", photo), Image.alpha_composite(white, shown).convert("RGB"), 1)
    palette = reopened(COLOURS.quantize(16), icc_profile=WIDE, transparency=0)
    same(to_rgba("image", palette).convert("RGB"), as_shown(palette.convert("RGB"), WIDE))
    assert transparent_part("image", palette).getextrema() == (0, 255)


@pytest.mark.parametrize(
    "profile",
    [b"nonsense", WIDE[:200], GREY, INKS, WIDE.replace(b"mntr", b"link", 1), WIDE.replace(b"RGB ", b"YCbr", 1)],
)
def test_a_profile_that_cannot_be_used_is_no_profile(profile):
    same(to_rgb("image", reopened(COLOURS, icc_profile=profile)), NOISE, 0)


def test_a_profile_that_takes_minutes_is_no_profile():
    began = time.process_time()
    same(to_rgb("image", reopened(COLOURS, "TIFF", icc_profile=SLOW)), NOISE, 0)
    assert time.process_time() - began < 5


def test_masks_and_coverage_are_no_colours():
    mask = Image.new("L", (8, 8))
    mask.paste(150, (0, 4, 8, 8))
    photo = reopened(mask, icc_profile=GREY)
    assert np.array_equal(to_mask("mask", photo), mask) and np.array_equal(to_levels("alpha", photo), mask)
    photo = reopened(mask.convert("RGB"), icc_profile=WIDE)
    assert np.array_equal(to_mask("mask", photo), mask) and np.array_equal(to_levels("alpha", photo), mask)


# PNG files without a profile


def described(image, gamma=None, chromaticities=None, srgb=False):
    """A PNG file that says what its numbers mean."""
    data, chunks = saved(image), b""
    for kind, numbers in ((b"gAMA", gamma and [gamma]), (b"cHRM", chromaticities)):
        if numbers:
            body = b"".join(struct.pack(">I", round(100_000 * number)) for number in numbers)
            chunks += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    if srgb:
        chunks += b"\0\0\0\1sRGB\0" + struct.pack(">I", zlib.crc32(b"sRGB\0"))
    return Image.open(io.BytesIO(data[:33] + chunks + data[33:]))


P3 = (0.3127, 0.329, 0.68, 0.32, 0.265, 0.69, 0.15, 0.06)
REC709 = (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)


def test_gamma_and_chromaticities_are_those_of_a_profile():
    same(to_rgb("image", described(COLOURS, 1 / 1.8, P3)), as_shown(COLOURS, matrix(*WIDE_PRIMARIES, gamma(1.8))), 3)
    linear = matrix(*SRGB_PRIMARIES, gamma(1.0))
    for photo in (described(COLOURS, 1.0), described(COLOURS, 1.0, REC709)):
        same(to_rgb("image", photo), as_shown(COLOURS, linear), 2)
    # An equal-energy white is white.
    white = Image.new("RGB", (4, 4), "white")
    same(to_rgb("image", described(white, 0.5, (1 / 3, 1 / 3, *P3[2:]))), white)


@pytest.mark.parametrize(
    "description",
    [
        {"gamma": 0.45455},
        {"gamma": 0.45455, "chromaticities": REC709},
        {"gamma": 1.0, "chromaticities": P3, "srgb": True},
        {"gamma": 0.45455, "chromaticities": (0.3, 0, *P3[2:])},
        {"chromaticities": (0.3127, 0.329, *(0.3, 0.3) * 3)},
    ],
)
def test_those_of_srgb_and_impossible_ones_change_nothing(description):
    same(to_rgb("image", described(COLOURS, **description)), NOISE, 0)


# Files


def test_files_and_frames_have_the_colours_of_their_profile(tmp_path):
    COLOURS.save(tmp_path / "a.png", icc_profile=WIDE)
    same(read_image(tmp_path / "a.png"), as_shown(COLOURS, WIDE))
    other = COLOURS.transpose(Image.Transpose.ROTATE_180)
    for suffix in (".webp", ".png"):
        path = tmp_path / f"film{suffix}"
        COLOURS.save(path, save_all=True, append_images=[other], duration=100, lossless=True, icc_profile=WIDE)
        first, second = read_video("--video", path)
        same(first, as_shown(COLOURS, WIDE))
        same(second, as_shown(other, WIDE))
