"""What a model has learned is what most of its images show."""

import itertools
import json
import sys
from collections import defaultdict

import pyarrow.parquet as pq
import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.cli import main as cli
from arimage.pipelines.text.known import KNOWN_CAPTIONS, load_known
from arimage_emoji.commands import app
from arimage_emoji.data import measure
from arimage_emoji.data.measure import MEASURED, SETTINGS, Gallery, Measurement, list_captions
from arimage_emoji.known import KnownCaptions
from arimage_emoji.training.captioned import ImageCaptions


KNOWN = KnownCaptions(
    {"red heart": ["heart", "love"], "blue book": ["a book", "The Heart!"], "green tree": ["fir"], "grinning cat": []},
    patterns=["a picture of {picture}"],
)
RECIPE = """
image_size = 8
[transformer.data]
styles = ["noto"]
[transformer.model]
[transformer.optimizer]
steps = 1
learning_rate = 1e-3
"""


def pictures(names, images=None) -> ImageCaptions:
    """One picture per name, by default of one grey each, 20 levels apart."""
    if images is None:
        greys = torch.arange(len(names), dtype=torch.uint8).mul(20)
        images = greys.view(-1, 1, 1, 1).expand(-1, 3, 8, 8)
    alpha = torch.full((len(names), 1, 8, 8), 255, dtype=torch.uint8)
    return ImageCaptions(images, alpha, [[name] for name in names], names, names, torch.ones(len(names)))


def measurement(known=KNOWN, seeds=4, needed=3) -> Measurement:
    names = [*known.pictures]
    return Measurement(list_captions(known), Gallery(pictures(names), names), seeds, needed)


def test_names_come_first_and_every_caption_once():
    captions = list_captions(KNOWN)
    assert [caption.text for caption in captions] == [*KNOWN.pictures, "heart", "love", "a book", "fir"]
    assert [caption.is_name for caption in captions] == [True] * 4 + [False] * 4
    assert {caption.text: caption.names for caption in captions}["heart"] == {"red heart", "blue book"}
    several = KnownCaptions({"red heart": ["a true love", "heart"], "old green tree": ["an old, tall fir", "a fir"]})
    texts = [caption.text for caption in list_captions(several)]
    assert texts == [*several.pictures, "heart", "a fir", "a true love", "an old, tall fir"]
    # What was not learned may have been learned since.
    again = KnownCaptions({"red heart": ["love"]}, unlearned={"red heart": ["red heart", "heart"], "cat": ["cat"]})
    assert [caption.text for caption in list_captions(again)] == ["red heart", "cat", "love", "heart"]


@pytest.mark.parametrize(("seeds", "needed"), [(4, 3), (4, 1), (4, 4), (1, 1), (5, 3)])
def test_only_images_that_decide_are_generated(seeds, needed):
    for outcome in itertools.product([True, False], repeat=seeds):
        measured = measurement(KnownCaptions({"heart": [], "book": []}), seeds, needed)
        heart, rounds = measured.captions[0], []
        while tasks := [seed for caption, seed in measured.next(100) if caption == heart]:
            rounds.append(tasks)
            assert measured.learned(heart) is None
            for seed in tasks:
                measured.shown["heart"][seed] = "heart" if outcome[seed] else "book"
        done = sum(rounds, [])
        assert done == [*range(len(done))]
        assert measured.learned(heart) == (sum(outcome) >= needed)
        # With one image less, both were possible.
        before = sum(outcome[: len(done) - 1])
        assert before < needed <= before + seeds - len(done) + 1


def test_a_caption_of_two_pictures_may_show_either_and_pictures_that_look_the_same_are_one():
    data = pictures(["red heart", "blue book", "green tree", "grinning cat"])
    data.images = data.images.clone()
    data.images[3] = data.images[2]
    measured = Measurement(list_captions(KNOWN), Gallery(data, data.names), 2, 2)
    by_text = {caption.text: caption for caption in measured.captions}
    measured.shown |= {"heart": {0: "red heart", 1: "blue book"}, "fir": {0: "grinning cat", 1: "green tree"}}
    measured.shown |= {"love": {0: "blue book"}}
    assert [measured.learned(by_text[text]) for text in ("heart", "fir", "love", "a book")] == [
        True,
        True,
        False,
        None,
    ]


def test_the_list_has_what_was_learned_and_what_was_not_measured():
    measured = measurement(seeds=1, needed=1)
    measured.shown |= {"red heart": {0: "blue book"}, "love": {0: "red heart"}, "heart": {0: "green tree"}}
    measured.shown |= {"grinning cat": {0: "green tree"}, "a book": {0: "blue book"}}
    found = measured.apply(KNOWN)
    assert found.pictures == {"red heart": ["love"], "blue book": ["a book"], "green tree": ["fir"]}
    assert found.unlearned == {
        "red heart": ["red heart", "heart"],
        "blue book": ["The Heart!"],
        "grinning cat": ["grinning cat"],
    }
    assert found.patterns == KNOWN.patterns
    assert measured.summary() == (
        "names of pictures: 0 of 2 learned (0.0%), 2 not measured\n"
        "other captions: 2 of 3 learned (66.7%), 1 not measured"
    )
    # Later the model has learned the heart.
    later = measurement(KNOWN, 1, 1)
    later.shown |= {"red heart": {0: "red heart"}, "love": {0: "green tree"}}
    again = later.apply(found)
    assert again.pictures["red heart"] == [] and again.unlearned["red heart"] == ["love", "heart"]


@pytest.fixture(scope="module")
def greedy():
    """A model that knows four pictures, and whose images are the same at every seed."""
    pipe = tiny_llamagen.text_pipeline()
    pipe.known_captions, pipe.generation_config = KNOWN, {"guidance_scale": 1.0, "top_k": 1}
    return pipe


@pytest.fixture
def folder(greedy, tmp_path, write_pictures):
    """A model, its training set, in which it shows two of its pictures as those of others, and its recipe."""
    greedy.save_pretrained(tmp_path / "model")
    names = [*KNOWN.pictures]
    images = greedy(names, output_type="pt").images
    assert len({image.numpy().tobytes() for image in images}) == 4
    arrays = images.permute(0, 2, 3, 1).mul(255).round().byte().numpy()
    shown = zip(["red heart", "blue book", "grinning cat", "green tree"], arrays, strict=True)
    write_pictures(tmp_path / "train.parquet", [{"image": image, "name": name} for name, image in shown])
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `arimage-emoji known` on a folder; returns its exit code, output and errors."""

    def run(folder, *more, out="out"):
        options = {"--data": "train.parquet", "--recipe": "recipe.toml", "--out": out}
        words = [str(word) for option, path in options.items() for word in (option, folder / path)]
        words = [str(folder / "model"), *words, "--batch-size", "2", "--dtype", "float32", *more]
        monkeypatch.setattr(sys, "argv", ["arimage-emoji", "known", *words])
        code = 0
        try:
            cli.main(app)
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return run


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "out" / MEASURED).read_text().splitlines()]


def test_the_command_finds_what_a_model_shows(folder, run):
    code, out, _ = run(folder)
    found = load_known(folder / "out")
    assert code == 0 and found is not None and str(folder / "out" / KNOWN_CAPTIONS) in out
    assert "names of pictures: 2 of 4 learned (50.0%)" in out
    assert found.knows("a red heart") and found.knows("a picture of a blue book")
    assert found.unlearned["green tree"][0] == "green tree" and "grinning cat" in found.unlearned["grinning cat"]
    # The same image three times, or twice if it is wrong.
    shown = defaultdict(list)
    for row in rows_of(folder):
        shown[row["caption"]].append((row["seed"], row["shows"]))
    assert shown["red heart"] == [(seed, "red heart") for seed in range(3)]
    assert shown["green tree"] == [(seed, "grinning cat") for seed in range(2)]
    assert sum(map(len, shown.values())) == len(rows_of(folder)) and len(shown) == 8


@pytest.mark.parametrize("torn", [pytest.param(b"", marks=pytest.mark.slow), b'{"caption": "red he'])
def test_an_interrupted_command_resumes_without_losing_an_image(folder, run, monkeypatch, torn):
    monkeypatch.setattr(measure, "BATCHES", 1)
    run(folder, out="whole")
    generate, calls = measure.generate_and_look, []

    def interrupted(*arguments):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(arguments)
        return generate(*arguments)

    monkeypatch.setattr(measure, "generate_and_look", interrupted)
    code, *_ = run(folder)
    assert code != 0
    kept = rows_of(folder)
    partial = load_known(folder / "out")
    assert len(kept) == 6 and partial is not None and partial.knows("fir")
    with open(folder / "out" / MEASURED, "ab") as file:
        file.write(torn)
    monkeypatch.setattr(measure, "generate_and_look", generate)
    assert run(folder)[0] == 0
    rows = rows_of(folder)
    assert rows[:6] == kept and len({(row["caption"], row["seed"]) for row in rows}) == len(rows)
    for name in (MEASURED, KNOWN_CAPTIONS):
        assert (folder / "out" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_what_does_not_fit_is_refused(folder, run, greedy):
    for more, message in (
        (("--needed", "5"), "--needed is 5 of 4 --seeds: give 1 to 4"),
        (("--recipe", "no-such"), "no-such"),
    ):
        code, _, err = run(folder, *more)
        assert code == 2 and message in err and not (folder / "out").exists()
    run(folder, "--limit", "1")
    (folder / "out" / MEASURED).write_text('{"caption": "fir", "seed": 0, "shows": "a hat"}\n')
    assert "line 1 of " in run(folder)[2]
    (folder / "out" / MEASURED).unlink()
    code, _, err = run(folder, "--dtype", "bfloat16")
    assert code == 2 and SETTINGS in err and "dtype" in err
    table = pq.read_table(folder / "train.parquet")
    pq.write_table(table.slice(1), folder / "train.parquet")
    assert "has no picture of 'red heart'" in run(folder)[2]
    (folder / "model" / KNOWN_CAPTIONS).unlink()
    assert "has no list of what it knows" in run(folder)[2]
