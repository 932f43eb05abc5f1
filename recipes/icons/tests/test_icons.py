"""From pictures of icons to a folder of a pipeline that generates them."""

import argparse
import io
import json
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from arimage import AutoPipeline
from arimage_icons.augment import SHIFT, augmented
from arimage_icons.data import Icons, load_packed
from arimage_icons.measure import compare, likeness
from arimage_icons.notice import lines
from arimage_icons.pack import pack
from arimage_icons.package import add_neighbours, load_run
from arimage_icons.train import train
from arimage_icons.words import has_sides, styles_of, word_tokenizer


NAMES = [("heart", "set", "heart-filled"), ("home", "pixelarticons", "home"), ("arrow left", "set", "arrow-left-line")]


def picture(seed: int) -> np.ndarray:
    """White with black bars and a few grey pixels."""
    draw = np.random.default_rng(seed)
    pixels = np.full((64, 64), 255, np.uint8)
    for row, column in draw.integers(8, 40, (4, 2)):
        pixels[row : row + 4, column : column + 16] = draw.integers(0, 128)
    return pixels


def png(pixels: np.ndarray) -> dict:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("icons")
    for split, count in {"train": 12, "val": 3, "test": 3}.items():
        caption, icon_set, name = zip(*(NAMES[i % 3] for i in range(count)), strict=True)
        columns = {"image": [png(picture(i)) for i in range(count)], "caption": caption, "set": icon_set, "name": name}
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")
    pack(folder, folder / "icons.npz", codebook_size=16)
    return folder / "icons.npz"


def test_captions_name_styles_that_names_and_sets_say():
    assert styles_of("heart", "heart-fill", "ri") == ["filled"]
    assert styles_of("heart", "heart-thin", "ph") == ["thin"]
    assert styles_of("heart", "heart", "pixelarticons") == ["pixel"]
    assert styles_of("line chart", "line-chart", "ri") == []
    assert styles_of("heart", "heart-outline-filled", "ri") == []
    assert has_sides("arrow left") and not has_sides("heart")


def test_the_tokenizer_reads_words_and_leaves_out_articles():
    tokenizer = word_tokenizer(["heart", "arrow left"])

    def words(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert words("A filled Heart!") == ["filled", "heart", "<unk>", "</s>"]
    assert words("an outline heart icon") == ["outlined", "heart", "</s>"]
    assert words("a wombat") == ["<unk>", "</s>"]


def test_augmented_pictures_are_shifted_by_whole_pixels_or_scaled_and_mirrored_where_they_may_be():
    pixels = torch.from_numpy(np.stack([picture(0)] * 64))
    may_mirror = torch.arange(64) < 32
    generator = torch.Generator().manual_seed(0)
    still, expected = augmented(pixels, may_mirror, 0.0, generator), pixels[0].float()
    mirrored = (still - expected.flip(-1)).abs().amax((1, 2)) < 0.5
    assert 8 < mirrored.sum() < 24 and not mirrored[32:].any()
    assert (still[~mirrored] - expected).abs().max() < 0.5
    moved = augmented(pixels, may_mirror & False, 1.0, generator)
    assert moved.shape == pixels.shape and moved.min() >= 0 and moved.max() <= 255
    shifts = [(row, column) for row in range(-SHIFT, SHIFT + 1) for column in range(-SHIFT, SHIFT + 1)]
    shifted = [expected.roll(it, (0, 1)) for it in shifts]
    whole = torch.stack([(moved - other).abs().amax((1, 2)) for other in shifted]).amin(0) < 0.5
    # One in five keeps its place, and of the others half are only shifted.
    assert 24 < whole.sum() < 56


def test_a_packed_file_gives_back_pictures_captions_and_a_codebook(packed):
    arrays, captions, vq = load_packed(packed)
    assert (arrays["train"][5] == picture(5)).all() and arrays["val"].shape == (3, 64, 64)
    assert captions["test"] == [["heart", ["filled"]], ["home", ["pixel"]], ["arrow left", ["outlined"]]]
    assert vq.scale_factor == 4 and vq.config.codebook_size == 16
    tokenizer = word_tokenizer(caption for rows in captions.values() for caption, _ in rows)
    icons = Icons.of(arrays["val"], captions["val"], tokenizer, "cpu")
    assert icons.may_mirror.tolist() == [True, True, False]
    assert tokenizer.batch_decode(icons.text[2], skip_special_tokens=True) == ["arrow left", "outlined arrow left"]


@pytest.mark.parametrize("kind", ["arpg", "llamagen"])
def test_a_trained_model_becomes_a_pipeline(kind, packed, tmp_path):
    given = {"model": kind, "data": packed, "out": tmp_path, "minutes": 1.0, "closing": 0.0, "report": 60.0}
    more = {"steps": 2, "batch_size": 4, "device": "cpu", "start": None, "compile": False, "tiny": True, "seed": 0}
    train(argparse.Namespace(**given, **more))
    log = [json.loads(line) for line in (tmp_path / f"{kind}.jsonl").read_text().splitlines()]
    assert next(row for row in log if "val" in row).keys() >= {"step", "val", "test", "train"}
    assert Image.open(tmp_path / f"{kind}.png").size == (64, 64)
    pipe, about = load_run(tmp_path / f"{kind}.safetensors")
    assert about["model"] == kind and about["captions"] == ["arrow left", "heart", "home"]
    if kind == "llamagen":
        add_neighbours(pipe, packed)
    pipe.save_pretrained(tmp_path / "icons")
    loaded = AutoPipeline.from_pretrained(tmp_path / "icons")
    loaded.set_progress_bar_config(disable=True)
    output = loaded("a filled heart", num_images_per_prompt=2, generator=torch.Generator().manual_seed(0))
    assert output.images[0].size == (64, 64) and output.stats.exact
    assert loaded.known_captions.knows("a thin home") and not loaded.known_captions.knows("a wombat")


def test_copies_are_found_and_their_names():
    train_inks = torch.eye(8)
    made = torch.eye(8)[:3] + 0.5 * torch.eye(8)[3:6]
    assert torch.allclose(likeness(train_inks, train_inks), torch.eye(8))
    found = compare(torch.cat([made, train_inks[:1]]), ["a", "b", "c", "a"], train_inks, [*"abcdefgh"])
    assert found["above 0.95"] == 0.25 and found["name among 5 nearest"] == 1.0


def test_the_notice_names_author_and_licence():
    about = {"name": "Set", "author": {"name": "A"}, "license": {"title": "MIT", "spdx": "MIT", "url": "https://x"}}
    expected = ["Set (set), 1,200 icons", "  A", "  MIT (SPDX: MIT), https://x"]
    assert lines({"set": about}, Counter({"set": 1200})) == expected
