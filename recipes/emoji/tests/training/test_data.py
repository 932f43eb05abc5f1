"""Pictures of training sets as viewers show them."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from profiles import WIDE, as_shown

from arimage.training.pixels import open_pixels
from arimage_emoji.training.captioned import COLUMNS, load_captioned_images


SIZE = 16
SHOWN = np.full((SIZE, SIZE, 3), 255, np.uint8)
SHOWN[:8] = 90


def photo(kind):
    """A file that viewers show as SHOWN."""
    image, options = Image.fromarray(SHOWN), {}
    if kind == "16 bits":
        image = Image.fromarray(SHOWN[..., 0].astype(np.uint16) * 257)
    elif kind == "transparent":
        image = Image.new("RGBA", (SIZE, SIZE))
        image.paste((90, 90, 90, 255), (0, 0, SIZE, 8))
    elif kind == "turned":
        image, options["exif"] = image.transpose(Image.Transpose.ROTATE_90), Image.Exif()
        options["exif"][0x0112] = 6
    data = io.BytesIO()
    image.save(data, "PNG", **options)
    return data.getvalue()


def captioned(path, image, alpha):
    row = dict.fromkeys(COLUMNS, "disc") | {"captions": [], "skin_tones": None, "weight": 1.0}
    row |= {"image": {"bytes": image, "path": None}, "alpha": {"bytes": alpha, "path": None}}
    pq.write_table(pa.Table.from_pylist([row]), path)
    return path


@pytest.mark.parametrize("kind", ["plain", "16 bits", "transparent", "turned"])
def test_pictures_are_those_that_viewers_show(kind, tmp_path):
    (tmp_path / "a.png").write_bytes(photo(kind))
    images, alpha = open_pixels(tmp_path, SIZE).read([0])
    assert np.array_equal(images[0].permute(1, 2, 0), SHOWN)
    opaque = 0 if kind == "transparent" else 255
    assert alpha[0, 0, :8].min() == 255 and alpha[0, 0, 8:].max() == opaque
    images = load_captioned_images(captioned(tmp_path / "a.parquet", photo(kind), photo(kind)), SIZE)
    assert np.array_equal(images.images[0].permute(1, 2, 0), SHOWN)
    assert np.array_equal(images.alpha[0, 0], SHOWN[..., 0])


@pytest.mark.parametrize("damaged", ["image", "alpha"])
def test_a_damaged_picture_is_named(damaged, tmp_path):
    whole, cut = photo("plain"), photo("plain")[:60]
    for name in ("a", "b"):
        (tmp_path / f"{name}.png").write_bytes(whole)
    (tmp_path / "b.png").write_bytes(cut)
    with pytest.raises(ValueError, match=f"^{tmp_path}/b.png cannot be read"):
        open_pixels(tmp_path, SIZE).read([0, 1])
    parts = {"image": whole, "alpha": whole, damaged: cut}
    with pytest.raises(ValueError, match=rf"^{damaged} of 'disc' in .*a.parquet cannot be read"):
        load_captioned_images(captioned(tmp_path / "a.parquet", **parts), SIZE)


ODD_TEXTS = [None, "", 5]
ODD = {
    "image": [None, {"bytes": None, "path": None}, {"bytes": b"", "path": None}, {"path": "a.png"}, "a.png"],
    "alpha": [None, {"bytes": None, "path": None}],
    "caption": ODD_TEXTS,
    "captions": [None, [None], [""], "a disc"],
    "style": [None],
    "group": ODD_TEXTS,
    "name": ODD_TEXTS,
    "base": ODD_TEXTS,
    "skin_tones": [[None], "light"],
    "keywords": [[None], "round"],
    "weight": [None, 0, 0.0, -1.0, float("nan"), float("inf"), 1e300, "1", True],
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("column", "value"), [(column, value) for column, values in ODD.items() for value in values])
def test_a_row_without_what_training_needs_is_named(column, value, tmp_path):
    path = captioned(tmp_path / "a.parquet", photo("plain"), photo("plain"))
    row = pq.read_table(path).to_pylist()[0] | {"weight": 2.0}
    pq.write_table(pa.Table.from_pylist([row | {column: value}]), path)
    with pytest.raises(ValueError, match=rf"^{path}, row 1: {column}.* is .*: give [^\n]*$"):
        load_captioned_images(path, SIZE)


def test_the_row_that_is_wrong_is_counted_in_the_file(tmp_path):
    path = captioned(tmp_path / "a.parquet", photo("plain"), photo("plain"))
    row = pq.read_table(path).to_pylist()[0]
    pq.write_table(pa.Table.from_pylist([row | {"style": "flat"}, row, row | {"weight": 0.0}]), path)
    with pytest.raises(ValueError, match=f"^{path}, row 3: weight is 0.0: give more than 0$"):
        load_captioned_images(path, SIZE, styles=["disc"])
    assert len(load_captioned_images(path, SIZE, styles=["flat"])) == 1


def test_weights_may_be_left_out(tmp_path):
    path = captioned(tmp_path / "a.parquet", photo("plain"), photo("plain"))
    row = pq.read_table(path).to_pylist()[0]
    pq.write_table(pa.Table.from_pylist([row | {"weight": 0.5}, row]), path)
    assert load_captioned_images(path, SIZE).weights.tolist() == [0.5, 1.0]
    assert load_captioned_images(path, SIZE, weighted=False).weights.tolist() == [1.0, 1.0]


def test_flags_of_countries_come_from_a_style_of_their_own(tmp_path):
    path = captioned(tmp_path / "a.parquet", photo("plain"), photo("plain"))
    row = pq.read_table(path).to_pylist()[0]
    flat = [row | {"style": "flat", "name": name} for name in ("flag: France", "white flag")]
    pq.write_table(pa.Table.from_pylist([row, *flat]), path)
    assert load_captioned_images(path, SIZE, styles=["disc"]).names == ["disc"]
    assert load_captioned_images(path, SIZE, styles=["disc"], flags="flat").names == ["disc", "flag: France"]


def test_a_file_that_is_not_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match=r"a.parquet cannot be read as parquet \(.*\): get the file again"):
        load_captioned_images(tmp_path / "a.parquet", SIZE)


def test_colours_are_those_of_their_profile_and_coverage_has_none(tmp_path):
    colours, data = Image.new("RGB", (SIZE, SIZE), (60, 200, 60)), io.BytesIO()
    colours.save(data, "PNG", icc_profile=WIDE)
    (tmp_path / "a.png").write_bytes(data.getvalue())
    shown = np.asarray(as_shown(colours, WIDE)).transpose(2, 0, 1)
    assert np.array_equal(open_pixels(tmp_path, SIZE).read([0])[0][0], shown)
    images = load_captioned_images(captioned(tmp_path / "a.parquet", data.getvalue(), data.getvalue()), SIZE)
    assert np.array_equal(images.images[0], shown)
    assert np.array_equal(images.alpha[0, 0], colours.convert("L"))
