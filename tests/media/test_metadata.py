"""How a picture was made, written into its file and read again."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from arimage import __version__
from arimage.media.files import can_write_mp4, read_metadata, read_video
from arimage.media.metadata import KEY, saving, to_text
from arimage.media.writing import write_files, write_grid, write_video


SETTINGS = {
    "model": "emoji-arpg",
    "prompt": 'a "red" heart; 50 % = #1\\ ❤️ 日本',
    "negative_prompt": "line one\nline two",
    "seed": 2**63 - 1,
    "decoding": "sjd-lazy:window=64",
    "temperature": 0.3,
    "top_k": 20,
    "lora": ["style.safetensors:0.8"],
    "made_from": ["image"],
}
FILMS = [".gif", ".webp", *([".mp4"] if can_write_mp4() else [])]


def picture(value=9):
    return Image.new("RGB", (32, 32), (value, 80, 90))


def found_in(path):
    return read_metadata(f"--from is {path}, which", path).model_dump(exclude_defaults=True)


@pytest.mark.parametrize("suffix", [".png", ".PNG", ".jpg", ".jpeg", ".webp"])
def test_a_picture_keeps_its_settings(tmp_path, suffix):
    path, without = tmp_path / f"x{suffix}", tmp_path / f"y{suffix}"
    write_grid([picture()], 1, path, text=to_text(SETTINGS))
    assert found_in(path) == SETTINGS | {"version": __version__}
    write_grid([picture()], 1, without)
    np.testing.assert_array_equal(np.asarray(Image.open(path)), np.asarray(Image.open(without)))
    with pytest.raises(ValueError, match=r"^--from is .*, which does not say how it was made"):
        found_in(without)


@pytest.mark.parametrize("suffix", FILMS)
@pytest.mark.parametrize("frames", [1, 5])
def test_a_film_keeps_its_settings_and_its_frames(tmp_path, suffix, frames):
    path = tmp_path / f"x{suffix}"
    # Equal frames, which GIF and WebP store once.
    write_video([picture()] * frames, path, 8, to_text(SETTINGS | {"num_frames": frames}))
    assert found_in(path) == SETTINGS | {"version": __version__, "num_frames": frames}
    assert len(read_video("--video", path)) == frames
    write_video([picture()] * frames, path, 8)
    with pytest.raises(ValueError, match="does not say"):
        found_in(path)


def with_text(text, key=KEY):
    info = PngInfo()
    info.add_itxt(key, text)
    data = io.BytesIO()
    picture().save(data, "PNG", pnginfo=info)
    return data.getvalue()


TEXT = to_text(SETTINGS)


@pytest.mark.parametrize(
    "data, reason",
    [
        (b"", "cannot be read"),
        (b"\x89PNG\r\n\x1a\n" + b"noise" * 9, "cannot be read"),
        (b"\0\0\0\x18ftypisom" + b"noise" * 9, "cannot be read"),
        (with_text("a heart, Steps: 20, Seed: 7", "parameters"), "does not say how it was made"),
        (with_text("{"), "not valid JSON"),
        (with_text("[" * 20_000), "too deeply nested|not valid JSON"),
        (with_text("[1]"), r"it is \[1\]"),
        (with_text(TEXT.replace("}", ', "seed": 1}')), "seed' is there twice"),
        (with_text(json.dumps({"version": "1", "model": "m"})), "seed is missing"),
        (with_text(TEXT.replace('"seed"', '"seeds"')), "seeds? is"),
        (with_text(json.dumps(json.loads(TEXT) | {"prompts": "tree"})), "prompts is 'tree'"),
        (with_text(json.dumps(json.loads(TEXT) | {"class_labels": [3]})), "class_labels is"),
        (with_text(json.dumps(json.loads(TEXT) | {"seed": -1})), "seed is -1"),
        (with_text(json.dumps(json.loads(TEXT) | {"temperature": "hot"})), "temperature is 'hot'"),
        (with_text(TEXT.replace("0.3", "NaN")), "temperature is nan"),
        (with_text(json.dumps(json.loads(TEXT) | {"prompt": "x" * 10_001})), "prompt is"),
        (with_text(" " * 2**16 + TEXT), "characters"),
    ],
)
def test_foreign_and_damaged_metadata_is_refused_in_one_sentence(tmp_path, data, reason):
    path = tmp_path / "x.png"
    path.write_bytes(data)
    if data[4:8] == b"ftyp" and not can_write_mp4():
        reason = "needs imageio"
    with pytest.raises(ValueError, match=reason) as error:
        found_in(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_jpeg_leaves_out_what_its_exif_data_cannot_hold(tmp_path):
    long = to_text(SETTINGS | {"prompt": "日" * 10_000, "negative_prompt": "本" * 10_000})
    assert saving(".png", long) and not saving(".jpg", long + " " * 20_000)["exif"].get_ifd(0x8769)
    for suffix in (".jpg", ".webp", ".png"):
        write_grid([picture()], 1, tmp_path / f"x{suffix}", text=long)
        assert found_in(tmp_path / f"x{suffix}")["prompt"] == "日" * 10_000


def test_files_are_named_by_prompt_and_seed_and_never_replaced(tmp_path):
    names, seeds = ["Red heart!", "red heart", "日本"], [7, 7, 8]
    first = write_files([picture(1), picture(2), picture(3)], names, seeds, tmp_path)
    assert [path.name for path in first] == ["red-heart-7.png", "red-heart-7-2.png", "image-8.png"]
    (again,) = write_files([picture(4)], ["red heart"], [7], tmp_path)
    assert again.name == "red-heart-7-3.png"
    assert [np.asarray(Image.open(path))[0, 0, 0] for path in (*first, again)] == [1, 2, 3, 4]
