"""`arimage generate` with images and masks as phones and editors write them."""

import numpy as np
import pytest
import tiny
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from profiles import WIDE, as_shown


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
def options(model, tmp_path):
    """The command on the images of this folder."""
    words = ["generate", "tree", "--model", model, "--device", "cpu", "--dtype", "float32", "--out", "out.png"]
    return [*words, "--image", "image.png"]


@pytest.fixture
def generate(options, run):
    """Run the command; returns the image that it wrote."""

    def generate(*arguments):
        code, _, err = run(*options, *arguments)
        assert code == 0, err
        return np.asarray(Image.open("out.png").convert("RGB"))

    return generate


def save(image, name="image.png", orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(name, exif=exif)


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["turned", "16 bits", "transparent", "palette", "profile"])
def test_what_is_kept_is_what_viewers_show(generate, kind):
    image, shown = Image.fromarray(SHOWN), SHOWN
    if kind == "16 bits":
        image = Image.fromarray(SHOWN[..., 0].astype(np.uint16) * 257)
    elif kind == "transparent":
        alpha = np.where(SHOWN[..., 0] == 90, 255, 0).astype(np.uint8)
        image = Image.fromarray(np.dstack([np.minimum(SHOWN, 90), alpha]))
    elif kind == "palette":
        image = image.quantize(2)
    elif kind == "turned":
        image = image.transpose(Image.Transpose.ROTATE_90)
    if kind == "profile":
        photo = Image.new("RGB", (SIZE, SIZE), (60, 200, 60))
        photo.save("image.png", icc_profile=WIDE)
        shown = np.asarray(as_shown(photo, WIDE))
    else:
        save(image, orientation=6 if kind == "turned" else 1)
    # The mask is turned as the photo is.
    save(Image.fromarray(CORNER).transpose(Image.Transpose.ROTATE_180), "mask.png", orientation=3)
    out = generate("--mask-image", "mask.png")
    assert np.array_equal(out[~CORNER], shown[~CORNER]) and not np.array_equal(out[CORNER], shown[CORNER])
    assert Image.open("out.png").info.get("icc_profile") is None


def test_without_a_mask_the_transparent_part_of_the_image_is_generated_again(generate, refused, options):
    hole = np.dstack([SHOWN, np.where(CORNER, 0, 255).astype(np.uint8)])
    save(Image.fromarray(hole))
    out = generate()
    assert np.array_equal(out[~CORNER], SHOWN[~CORNER]) and not np.array_equal(out[CORNER], SHOWN[CORNER])
    save(Image.fromarray(SHOWN))
    error = refused(*options)
    assert "there is no --mask-image" in error and "make it transparent where" in error


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Image.new("L", (SIZE, SIZE)), "selects nothing: make it white where"),
        (Image.new("RGBA", (SIZE, SIZE), (255, 0, 0, 0)), "is transparent in part"),
        (None, "cannot be read"),
    ],
)
def test_masks_are_refused_before_the_model_is_loaded(refused, options, mask, message, monkeypatch, tmp_path):
    for module in ("generate", "options"):
        monkeypatch.setattr(f"arimage.cli.{module}.load_pipeline", lambda *_, **__: pytest.fail("it was loaded"))
    save(Image.fromarray(SHOWN))
    save(mask or Image.effect_noise((SIZE, SIZE), 50), "mask.png")
    if mask is None:
        (tmp_path / "mask.png").write_bytes((tmp_path / "mask.png").read_bytes()[:-80])
    assert f"--mask-image is mask.png, which {message}" in refused(*options, "--mask-image", "mask.png")
