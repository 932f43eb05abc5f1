"""From pictures of icons to a folder of a pipeline that generates them."""

import io
import json
import re
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

import arimage
from arimage import AutoPipeline
from arimage.cli import main as cli
from arimage.pipelines.text.captions import caption_for
from arimage.training.recipe import TokenRecipe, load_augmentation, load_recipe
from arimage.training.tokens.beginning import token_settings
from arimage.training.tokens.text import train_text_tokenizer
from arimage_icons import RECIPES
from arimage_icons.captions import captions_of, write_captions
from arimage_icons.compositions import compare, readings
from arimage_icons.package import package
from arimage_icons.resize import resize
from arimage_icons.words import styles_of, word_tokenizer


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
def data(tmp_path_factory):
    """The files of a small data set with captions, and the tokenizer of their words."""
    folder = tmp_path_factory.mktemp("icons")
    for split, count in {"train": 12, "val": 3, "test": 3}.items():
        caption, icon_set, name = zip(*(NAMES[i % 3] for i in range(count)), strict=True)
        # No picture of one split is in another.
        images = [png(picture(i + 100 * len(split))) for i in range(count)]
        columns = {"image": images, "caption": caption, "set": icon_set, "name": name}
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")
    write_captions(folder, folder / "captioned")
    return folder / "captioned"


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code


def changed(recipe, folder, **settings):
    """A recipe with other settings."""
    text = (RECIPES / f"{recipe}.toml").read_text()
    for name, value in settings.items():
        text, count = re.subn(rf"(?m)^{name} = .*$", f"{name} = {value}", text)
        assert count
    (folder / f"{recipe}.toml").write_text(text)
    return folder / f"{recipe}.toml"


def test_captions_name_styles_that_names_and_sets_say():
    assert styles_of("heart", "heart-fill", "ri") == ["filled"]
    assert styles_of("heart", "heart-thin", "ph") == ["thin"]
    assert styles_of("heart", "heart", "pixelarticons") == ["pixel"]
    assert styles_of("line chart", "line-chart", "ri") == []
    assert styles_of("heart", "heart-outline-filled", "ri") == []


def test_the_tokenizer_reads_words_and_leaves_out_articles():
    tokenizer = word_tokenizer(["heart", "arrow left"])

    def words(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert words("A filled Heart!") == ["filled", "heart", "</s>"]
    assert words("an outline heart icon") == ["outlined", "heart", "</s>"]
    assert words("a wombat") == ["<unk>", "</s>"]


def test_words_that_captions_of_other_models_lose_are_kept():
    words = ["download", "file pdf", "cloud download"]
    tokenizer = word_tokenizer(words)
    assert [tokenizer.tokenize(caption_for(tokenizer, f"A {text}, icon!")) for text in words] == [
        text.split() for text in words
    ]
    assert caption_for(train_text_tokenizer(words, 300, 8), "free download") == ""


def test_captions_come_with_and_without_words_of_style(data):
    table = pq.read_table(data / "test.parquet")
    assert table["captions"].to_pylist() == [
        ["filled heart", "heart"],
        ["pixel home", "home"],
        ["outlined arrow left", "arrow left"],
    ]
    assert table.column_names == ["image", "caption", "set", "name", "captions"]
    assert captions_of("line chart", "line-chart", "ri") == ["line chart"]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data / "words")
    assert tokenizer.get_vocab() == word_tokenizer(["heart", "home", "arrow left"]).get_vocab()


def test_the_recipes_are_found_by_their_names_and_fit_their_models():
    assert {path.stem for path in RECIPES.glob("*.toml")} == {
        "icons-patches",
        "icons-arpg",
        "icons-llamagen",
        "icons-words",
        "icons-maskgit",
    }
    changes = load_augmentation(RECIPES / "icons-patches.toml")
    assert changes.may_mirror(["filled heart", "heart"])
    assert not changes.may_mirror(["outlined arrow left", "arrow left"])
    sizes = {"icons-arpg": 4_989_184, "icons-llamagen": 5_180_672, "icons-maskgit": 4_276_352}
    for name, parameters in sizes.items():
        table = load_recipe(str(RECIPES / f"{name}.toml"), TokenRecipe)
        assert token_settings(table).best == "val"
        kind = getattr(arimage, table.pipeline.replace("Pipeline", "Transformer"))
        with torch.device("meta"):
            model = kind(
                conditioning="text",
                vocab_size=512,
                grid_size=16,
                caption_dim=128,
                num_condition_tokens=8,
                **table.model,
            )
        assert sum(weight.numel() for weight in model.parameters()) == parameters


@pytest.mark.parametrize(
    "name",
    ["icons-arpg", *(pytest.param(f"icons-{name}", marks=pytest.mark.slow) for name in ("llamagen", "maskgit"))],
)
def test_the_commands_train_a_model_that_is_packaged(name, data, tmp_path, monkeypatch):
    recipe = changed("icons-patches", tmp_path, codebook_size=16, copies=3)
    words = ["--data", data / "train.parquet", "--heldout", data / "test.parquet", "--workers", 0, "--device", "cpu"]
    run(monkeypatch, "train", "tokenizer", "--recipe", recipe, *words, "--out", tmp_path / "run")
    for split in ("train", "val", "test"):
        words = ["--data", data / f"{split}.parquet", "--caption", "captions", "--device", "cpu"]
        words += ["--augmentation", recipe] if split == "train" else []
        words += ["--model", tmp_path / "run" / "tokenizer" / "tokenizer", "--out", tmp_path / "tokens" / split]
        run(monkeypatch, "train", "tokens", *words)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_layers": 2}
    words = []
    if name != "icons-maskgit":
        # That has its text encoder from a trained model.
        small |= {"d_model": 32, "d_ff": 64}
        words = ["--text-tokenizer", data / "words"]
    recipe = changed(name, tmp_path, steps=2, batch_size=4, workers=0, warmup_steps=1, **small)
    words += ["--recipe", recipe, "--device", "cpu", "--out", tmp_path / "out"]
    words += ["--tokens", tmp_path / "tokens" / "train", "--heldout", tmp_path / "tokens" / "val"]
    run(monkeypatch, "train", "model", *words, "--heldout", tmp_path / "tokens" / "test")
    row = json.loads((tmp_path / "out" / "transformer" / "log.jsonl").read_text().splitlines()[-1])
    assert row.keys() == {"step", "nats per picture, val", "nats per picture, test"}
    trained = tmp_path / "out" / "best"
    if name == "icons-llamagen":
        words = ["--model", trained, "--tokens", tmp_path / "tokens" / "train", "--out", tmp_path / "neighbours"]
        run(monkeypatch, "train", "neighbours", *words)
        trained = tmp_path / "neighbours" / "model"
    package(trained, tmp_path / "icons", data)
    loaded = AutoPipeline.from_pretrained(tmp_path / "icons")
    loaded.set_progress_bar_config(disable=True)
    output = loaded("a filled heart", num_images_per_prompt=2, generator=torch.Generator().manual_seed(0))
    assert output.images[0].size == (64, 64) and output.stats.exact
    assert loaded.known_captions.knows("a thin home") and not loaded.known_captions.knows("a wombat")
    assert not list((tmp_path / "icons").rglob("*.py"))
    if name == "icons-arpg":
        train_on_more_words(tmp_path, data, monkeypatch)


def train_on_more_words(folder, data, monkeypatch):
    """Train what is in `folder` further, as a narrower model that reads other words too."""
    word_tokenizer(["heart", "home", "arrow left", "download"]).save_pretrained(folder / "words")
    with pytest.raises(ValueError, match="--hidden is 65"):
        resize(folder / "icons", folder / "words", folder / "tokens" / "train", 65, folder / "begin")
    resize(folder / "icons", folder / "words", folder / "tokens" / "train", 48, folder / "begin")
    recipe = changed("icons-words", folder, steps=1, batch_size=4, warmup_steps=1)
    words = ["--recipe", recipe, "--start-from", folder / "begin", "--device", "cpu", "--out", folder / "further"]
    for split in ("val", "test"):
        words += ["--heldout", folder / "tokens" / split]
    run(monkeypatch, "train", "model", "--tokens", folder / "tokens" / "train", *words)
    package(folder / "further" / "best", folder / "more", data)
    further = AutoPipeline.from_pretrained(folder / "more")
    assert further.known_captions.knows("a thin home download") and not further.known_captions.knows("a wombat")
    assert further.transformer.config.intermediate_size == 48
    texts = ["download", "home", "a wombat"]
    table = compare([str(folder / name) for name in ("icons", "more")], folder / "tokens" / "val").splitlines()
    # One of the three icons has a name of two words.
    assert len(table) == 4 and table[-1].split("|")[2].strip() == "1"
    word_tokenizer(["heart"]).save_pretrained(folder / "more" / "tokenizer")
    with pytest.raises(ValueError, match="two words that the models know"):
        compare([str(folder / "more")], folder / "tokens" / "val")
    states, _ = further.encode_prompt(texts)
    assert further.tokenizer.tokenize(texts[0]) == ["download"]
    assert all(not states[one].allclose(states[other], atol=1e-3) for one, other in ((0, 1), (0, 2), (1, 2)))


def test_readings_of_a_composition_give_its_words_apart_and_those_of_another():
    found = readings(["cloud cube", "image lock", "cloud cube"])
    assert [texts for texts, _ in found.values()] == [
        ["cloud cube", "image lock", "cloud cube"],
        ["cloud", "image", "cloud"],
        ["cube", "lock", "cube"],
        ["cloud cube", "image lock", "cloud cube"],
        ["image lock", "cloud cube", "image lock"],
    ]
    assert [name for name, (_, given) in found.items() if not given] == ["no words"]
