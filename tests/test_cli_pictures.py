"""`arimage generate` with images and masks as phones and editors write them."""

import sys

import numpy as np
import pytest
import tiny
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from profiles import WIDE, as_shown

from arimage.cli import main as cli
from arimage.cli import options


SIZE, CELL = 4 * tiny.SCALE_FACTOR, tiny.SCALE_FACTOR
SHOWN = np.full((SIZE, SIZE, 3), 255, np.uint8)
SHOWN[: SIZE // 2] = 90
# The cell of the upper left corner is generated again.
CORNER = np.zeros((SIZE, SIZE), bool)
CORNER[:CELL, :CELL] = True


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "text"
    tiny_llamagen.text_pipeline(4).save_pretrained(folder)
    return folder


@pytest.fixture
def generate(model, tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder; returns the image that it wrote, or the line of its error."""
    monkeypatch.chdir(tmp_path)

    def generate(*arguments):
        words = ["generate", "tree", "--model", model, "--device", "cpu", "--dtype", "float32", "--out", "out.png"]
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words), *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        if not end.value.code:
            return np.asarray(Image.open("out.png").convert("RGB"))
        error = capsys.readouterr().err
        assert end.value.code == 2 and error.count("\n") == 1
        return error

    return generate


def save(image, name="image.png", orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(name, exif=exif)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["turned", "16 bits", "transparent", "palette"])
def test_what_is_kept_is_what_viewers_show(generate, kind, tmp_path):
    image = Image.fromarray(SHOWN)
    if kind == "16 bits":
        image = Image.fromarray(SHOWN[..., 0].astype(np.uint16) * 257)
    elif kind == "transparent":
        image = Image.fromarray(
            np.dstack([np.minimum(SHOWN, 90), np.where(SHOWN[..., 0] == 90, 255, 0).astype(np.uint8)])
        )
    elif kind == "palette":
        image = image.quantize(2)
    save(
        image.transpose(Image.Transpose.ROTATE_90) if kind == "turned" else image,
        orientation=6 if kind == "turned" else 1,
    )
    # The mask is turned as the photo is.
    save(Image.fromarray(CORNER).transpose(Image.Transpose.ROTATE_180), "mask.png", orientation=3)
    out = generate("--image", "image.png", "--mask-image", "mask.png")
    assert np.array_equal(out[~CORNER], SHOWN[~CORNER]) and not np.array_equal(out[CORNER], SHOWN[CORNER])


def test_what_is_kept_has_the_colours_that_viewers_show(generate):
    photo = Image.new("RGB", (SIZE, SIZE), (60, 200, 60))
    photo.save("image.png", icc_profile=WIDE)
    save(Image.fromarray(CORNER), "mask.png")
    out = generate("--image", "image.png", "--mask-image", "mask.png")
    shown = np.asarray(as_shown(photo, WIDE))
    assert np.abs(shown[0, 0].astype(int) - (60, 200, 60)).max() > 40
    assert np.array_equal(out[~CORNER], shown[~CORNER])
    assert Image.open("out.png").info.get("icc_profile") is None


def test_without_a_mask_the_transparent_part_of_the_image_is_generated_again(generate):
    hole = np.dstack([SHOWN, np.where(CORNER, 0, 255).astype(np.uint8)])
    save(Image.fromarray(hole))
    out = generate("--image", "image.png")
    assert np.array_equal(out[~CORNER], SHOWN[~CORNER]) and not np.array_equal(out[CORNER], SHOWN[CORNER])
    save(Image.fromarray(SHOWN))
    error = generate("--image", "image.png")
    assert "there is no --mask-image, and --image image.png has no transparency: make it transparent where" in error


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (SIZE, SIZE)), "--mask-image is mask.png, which selects nothing: make it white where"),
        (Image.new("RGBA", (SIZE, SIZE), (255, 0, 0, 0)), "--mask-image is mask.png, which is transparent in part"),
        (None, "--mask-image is mask.png, which cannot be read"),
    ],
)
def test_masks_are_refused_before_the_model_is_loaded(generate, mask, message, monkeypatch, tmp_path):
    monkeypatch.setattr(options, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setattr(cli, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    save(Image.fromarray(SHOWN))
    save(mask or Image.effect_noise((SIZE, SIZE), 50), "mask.png")
    if mask is None:
        (tmp_path / "mask.png").write_bytes((tmp_path / "mask.png").read_bytes()[:-80])
    assert message in generate("--image", "image.png", "--mask-image", "mask.png")
