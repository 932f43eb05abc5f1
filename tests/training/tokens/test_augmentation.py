"""Copies of images that differ at random, in the cache of their tokens."""

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen
from training.tokens.test_cache import class_folders, encode, parquet

from arimage.cli import main as cli


pytest.importorskip("datasets", reason="the extra `train` is not installed")
from arimage.settings.schema import check  # noqa: E402
from arimage.training.data.sources import open_source  # noqa: E402
from arimage.training.tokens.augmentation import Augmentation  # noqa: E402
from arimage.training.tokens.cache import TokenCache, encode_tokens, read_index  # noqa: E402


WHITE = (255, 255, 255)


def drawing(side=32):
    """White with a block of noise in the middle, [1, 3, H, W]."""
    pixels = torch.full((1, 3, side, side), 255, dtype=torch.uint8)
    noise = torch.randint(200, (3, side // 2, side // 2), generator=torch.Generator().manual_seed(0))
    pixels[0, :, side // 4 : -side // 4, side // 4 : -side // 4] = noise.to(torch.uint8)
    return pixels


def test_the_first_copy_is_the_image_and_mirrored_ones_are_exact():
    image = drawing()
    copies = Augmentation(copies=65, mirror=True).copies_of(image, True, 0)
    assert copies.shape == (65, *image.shape) and torch.equal(copies[0], image)
    mirrored = (copies == image.flip(-1)).flatten(1).all(1)
    still = (copies == image).flatten(1).all(1)
    assert (mirrored | still).all() and 20 < mirrored.sum() < 44
    assert not (Augmentation(copies=65, mirror=True).copies_of(image, False, 0) != image).any()


def test_copies_are_shifted_by_whole_pixels_or_scaled():
    image = drawing()
    copies = Augmentation(copies=201, shift=3, scale=0.2, padding=WHITE).copies_of(image, False, 0)[1:]
    shifted = [image.roll((row, column), (-2, -1)) for row in range(-3, 4) for column in range(-3, 4)]
    whole = torch.stack([(copies == one).flatten(1).all(1) for one in shifted])
    # One in five keeps its place, and half of the others are scaled.
    assert 25 < whole[24].sum() < 62 and 90 < whole.any(0).sum() < 150 and (whole.sum(1) > 0).sum() > 30
    scaled = copies[~whole.any(0)]
    area = (scaled < 250).flatten(1).float().mean(1) / (image < 250).float().mean()
    assert 0.6 < area.min() < 0.85 and 1.2 < area.max() < 1.75
    # Without a scale all are shifted by whole pixels.
    copies = Augmentation(copies=20, shift=3, padding=WHITE).copies_of(image, False, 0)
    assert torch.stack([(copies == one).flatten(1).all(1) for one in shifted]).any(0).all()


def test_outside_are_the_nearest_pixels_or_a_colour():
    image = torch.randint(256, (1, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    image[..., 0] = 100
    edge = Augmentation(copies=100, shift=4).copies_of(image, False, 0)
    colour = Augmentation(copies=100, shift=4, padding=(10, 20, 30)).copies_of(image, False, 0)
    right = [number for number in range(100) if torch.equal(edge[number, ..., 1:], image[..., :-1])]
    assert right and all((edge[number, ..., 0] == 100).all() for number in right)
    expected = torch.tensor([10, 20, 30], dtype=torch.uint8)[:, None].expand(3, 8)
    assert all(torch.equal(colour[number, 0, ..., 0], expected) for number in right)
    assert all(torch.equal(colour[number, ..., 1:], image[..., :-1]) for number in right)


def test_frames_of_a_clip_change_alike():
    frames = torch.cat([drawing(), drawing().flip(1)])
    copies = Augmentation(copies=9, shift=4, scale=0.1, mirror=True).copies_of(frames, True, 0)
    assert copies.shape == (9, *frames.shape) and torch.equal(copies[:, 0], copies[:, 1].flip(1))


def test_words_of_captions_say_what_is_not_mirrored():
    changes = Augmentation(copies=2, mirror=True, mirror_except=("left", "Text"))
    assert changes.may_mirror(["a leftover", "context"])
    assert not changes.may_mirror(["a heart", "Left-hand arrow"]) and not changes.may_mirror(["text"])
    assert not Augmentation(copies=2).may_mirror(["a heart"])


@pytest.mark.parametrize(
    "setting", [{"copies": 1}, {"scale": 1.0}, {"padding": "white"}, {"padding": [0, 0, 256]}, {"shift": -1}]
)
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        check(Augmentation, {"copies": 2, **setting}, "table")


def test_a_cache_has_the_tokens_of_the_copies(tmp_path):
    pipe, changes = tiny_llamagen.class_pipeline(), Augmentation(5, 2, 0.1, True, ("bee",), seed=3)
    data = class_folders(tmp_path / "data")
    encode(pipe, data, tmp_path / "tokens", augmentation=changes, size=16)
    encode(pipe, data, tmp_path / "plain", size=16)
    cache, plain = TokenCache(tmp_path / "tokens"), TokenCache(tmp_path / "plain")
    assert cache.views == 5
    first = plain.read([4], [0])[0]
    assert torch.equal(cache.read([4], [0])[0], first)
    assert len({tuple(cache.read([4], [view])[0].flatten().tolist()) for view in range(5)}) > 2
    # As a whole run, one that was stopped.
    (data / "cow" / "0.png").rename(tmp_path / "kept.png")
    (data / "cow" / "0.png").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="row 7"):
        encode(pipe, data, tmp_path / "parts", augmentation=changes, size=16)
    (tmp_path / "kept.png").rename(data / "cow" / "0.png")
    encode(pipe, data, tmp_path / "parts", augmentation=changes, size=16)
    assert TokenCache(tmp_path / "parts").digest == cache.digest
    with pytest.raises(ValueError, match=r"says augmentation.shift = 2"):
        encode(pipe, data, tmp_path / "tokens", augmentation=Augmentation(5, 1, 0.1, True, ("bee",), seed=3), size=16)
    with pytest.raises(ValueError, match="says augmentation = "):
        encode(pipe, data, tmp_path / "plain", augmentation=changes, size=16)


def test_names_of_classes_and_all_captions_say_what_is_not_mirrored(tmp_path):
    pipe = tiny_llamagen.class_pipeline()
    changes = Augmentation(copies=30, mirror=True, mirror_except=("left",))
    root = tmp_path / "data"
    for name in ("left", "heart"):
        (root / name).mkdir(parents=True)
        levels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(levels).save(root / name / "a.png")
    parquet(tmp_path / "a.parquet", range(2), captions=[["a heart", "left"], ["a heart"]])
    encode(pipe, root, tmp_path / "classes", augmentation=changes, size=16)
    text = tiny_llamagen.text_pipeline()
    source = open_source(str(tmp_path / "a.parquet"), caption="captions")
    encode_tokens(source, text, tmp_path / "captions", model="tiny", augmentation=changes, size=16)
    for folder, sided, free in (("classes", 1, 0), ("captions", 0, 1)):
        cache = TokenCache(tmp_path / folder)
        counts = [len({tuple(cache.read([image], [v])[0].flatten().tolist()) for v in range(30)}) for image in (0, 1)]
        assert (counts[sided], counts[free]) == (1, 2)


def test_the_command_reads_the_table_of_a_recipe(tmp_path, monkeypatch, capsys):
    pipe, data = tiny_llamagen.class_pipeline(), class_folders(tmp_path / "data")
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "a.toml").write_text("image_size = 16\n[augmentation]\ncopies = 3\nshift = 2\n")

    def run(*more):
        words = ["train", "tokens", "--data", data, "--model", tmp_path / "model", "--out", tmp_path / "tokens"]
        words += ["--augmentation", tmp_path / "a.toml", "--device", "cpu", *more]
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code

    assert run("--views", "ten-crop") == 2 and "--views is ten-crop" in capsys.readouterr().err
    assert not run() and read_index(tmp_path / "tokens").about["augmentation"]["padding"] == "edge"
    assert TokenCache(tmp_path / "tokens").views == 3
    (tmp_path / "a.toml").write_text("image_size = 16\n")
    assert run() == 2 and "[augmentation]" in capsys.readouterr().err
