"""What a model knows: known and unknown prompts, what is near, and that pipelines keep and use it."""

import json
import time
import unicodedata

import pytest
from pipelines.llamagen import tiny as tiny_llamagen

from arimage import AutoPipeline, LlamaGenPipeline
from arimage.pipelines.text.known import KNOWN_CAPTIONS, load_known
from arimage_emoji import MODELS
from arimage_emoji.known import KnownCaptions


COMBINED = KnownCaptions(
    pictures={
        "red apple": ["apple"],
        "cat": ["kitty, sitting cat"],
        "dog": [],
        "house": [],
        "houses": [],
        "fork and knife": ["cutlery"],
        "mouse": [],
    },
    words={
        "colour": ["red", "blue", "light green"],
        "coloured": ["apple", "house"],
        "number": ["two", "2"],
        "things": ["cats", "mice"],
        "thing": ["cat", "dog", "fork and knife"],
    },
    patterns=[
        "a picture of {picture}",
        "{colour} {coloured}",
        "{number} {things}",
        "{thing} and {thing}",
        "{picture} on a {colour} background",
    ],
)


PACKAGED = ["emoji-llamagen", "emoji-var", "emoji-arpg"]


@pytest.fixture(
    scope="module", params=[PACKAGED[0], *(pytest.param(it, marks=pytest.mark.slow) for it in PACKAGED[1:])]
)
def packaged(request) -> KnownCaptions:
    known = load_known(MODELS / request.param)
    assert known is not None
    return known


def test_captions_and_what_is_made_of_them_are_known():
    known = [
        "red apple", "A red apple!", "Kitty, sitting cat", "a picture of the cutlery", "a blue apple",
        "light-green house", "two cats", "2 mice", "a cat and a dog", "a fork and knife and a cat",
        "a cat on a light green background",
    ]  # fmt: skip
    assert [prompt for prompt in known if not COMBINED.knows(prompt) or COMBINED.check(prompt, "m")] == []


def test_everything_else_is_not():
    unknown = [
        "", "a picture of", "apples", "green apple", "a blue cat", "three cats", "two houses", "two cats and a dog",
        "a cat and a house", "kitty", "a red", "猫",
    ]  # fmt: skip
    assert [prompt for prompt in unknown if COMBINED.knows(prompt)] == []


@pytest.mark.parametrize(
    ("prompt", "nearest"),
    [
        ("a house by the sea", ["house", "houses"]),
        ("green apples", ["red apple"]),
        ("kitty", ["cat"]),
        ("huose", ["house", "houses"]),
        ("a hat", []),
        ("flag of France", []),
        ("", []),
    ],
)
def test_the_nearest_share_words_or_their_spelling(prompt, nearest):
    assert COMBINED.nearest(prompt) == nearest


def test_packaged_models_know_their_captions(packaged):
    rows = [json.loads(line) for line in (MODELS / "emoji-reference" / "prompts.jsonl").read_text().splitlines()]
    assert {row["name"] for row in rows} <= {*packaged.pictures, *packaged.unlearned}
    unknown = [found for row in rows if (found := packaged.check(row["prompt"], "m"))]
    # Some were trained and not learned, and are reported as such.
    assert len(unknown) < 0.1 * len(rows)
    assert all("has not learned" in found.message for found in unknown)
    assert packaged.knows("A red heart") and packaged.knows("an emoji of a clown face")


def test_accents_may_be_written_apart(packaged):
    apart = unicodedata.normalize("NFD", "piñata")
    assert apart != "piñata" and packaged.check("piñata", "m") is packaged.check(apart, "m") is None
    assert KnownCaptions({apart: []}).knows("piñata") and KnownCaptions({apart: []}).nearest("piñatas") == [apart]


@pytest.mark.parametrize("prompt", ["a tree", "a house", "a dog", "the moon", "pizza"])
def test_the_packaged_models_know_what_people_ask_for(packaged, prompt):
    assert packaged.check(prompt, "m") is None


@pytest.mark.parametrize("prompt", ["two cats", "a robot on a blue background"])
def test_what_the_packaged_models_compose_badly_is_not_called_known(packaged, prompt):
    assert packaged.check(prompt, "m") is not None


def test_colours_and_pairs_are_known_to_the_model_that_shows_them():
    known = {name: load_known(MODELS / name) for name in PACKAGED}
    for prompt in ("a blue apple", "a cat and a dog", "a purple car"):
        assert [name for name in PACKAGED if known[name].check(prompt, name) is None] == ["emoji-arpg"], prompt


def test_the_packaged_model_of_videos_knows_its_motions():
    known = load_known(MODELS / "emoji-video-blocks")
    assert known is not None
    for prompt in ("a red heart, moving right", "pizza on a light blue background, growing and spinning"):
        assert known.knows(prompt)
    for prompt in ("a red heart, dancing", "a lion, moving right"):
        assert known.check(prompt, "emoji-video-blocks") is not None


@pytest.mark.parametrize("prompt", ["tree " * 2000, "x" * 10_000, " ".join(f"gren{i}appel" for i in range(500))])
def test_long_prompts_take_no_time_and_are_not_repeated(packaged, prompt):
    began = time.process_time()
    unknown = packaged.check(prompt, "m")
    assert time.process_time() - began < 1
    assert unknown is not None and len(unknown.message) < 250


def test_one_sentence_tells_it():
    assert COMBINED.check("a hat", "m").message == (
        '"a hat" is not among the 7 pictures that m knows and can combine; none is similar'
    )
    simple = KnownCaptions(COMBINED.pictures)
    assert simple.check("green apple", "m").message.endswith('that m knows; the nearest is "red apple"')
    unknown = simple.check("a house\nby  the sea", "m")
    assert unknown.message.startswith('"a house by the sea" is not') and unknown.message.endswith(
        '"house" and "houses"'
    )
    assert unknown.nearest == ["house", "houses"]


UNLEARNED = KnownCaptions(
    pictures={"wizard": ["mage", "a sorcerer"], "witch": [], "cat": ["kitty"]},
    patterns=["a drawing of {picture}", "{adjective} {picture}"],
    words={"adjective": ["cute"]},
    unlearned={"wizard": ["wizard", "magician"], "dragon": ["dragon"]},
)


@pytest.mark.parametrize("prompt", ["a wizard", "the Magician", "a drawing of a wizard", "cute dragon"])
def test_what_was_not_learned_well_is_told(prompt):
    unknown = UNLEARNED.check(prompt, "m")
    assert not UNLEARNED.knows(prompt) and unknown.message.startswith(
        f'"{prompt}" is a caption that m has not learned well: most of its images show something else; '
    )
    assert "not learned" not in UNLEARNED.check(f"{prompt} and a horse", "m").message


def test_what_was_not_learned_is_not_suggested():
    assert UNLEARNED.learned == {"mage": ["a sorcerer"], "witch": [], "cat": ["kitty"]}
    assert UNLEARNED.shown == {"mage": "wizard", "witch": "witch", "cat": "cat"}
    # A caption of several pictures shows one of them.
    men = {name: [name] for name in ("man", "boy", "uncle")}
    shared = KnownCaptions(
        {"man": ["person", "man too"], "boy": ["person", "young man"], "uncle": ["person"]}, unlearned=men
    )
    assert shared.shown == {"person": "man", "young man": "boy"} and shared.knows("man too")
    assert UNLEARNED.nearest("dragons") == [] and UNLEARNED.nearest("sorcerers") == ["mage"]
    assert UNLEARNED.knows("a drawing of a mage") and UNLEARNED.knows("sorcerer")
    assert UNLEARNED.check("a hat", "m").message.startswith('"a hat" is not among the 3 pictures that m knows; none')


def test_pipelines_keep_it(tmp_path):
    pipe = tiny_llamagen.text_pipeline()
    pipe.save_pretrained(tmp_path / "without")
    assert not (tmp_path / "without" / KNOWN_CAPTIONS).exists()
    assert AutoPipeline.from_pretrained(tmp_path / "without").known_captions is None
    for known in (COMBINED, UNLEARNED):
        pipe.known_captions = known
        pipe.save_pretrained(tmp_path / "with")
        loaded = LlamaGenPipeline.from_pretrained(tmp_path / "with")
        assert loaded.known_captions == known
        assert LlamaGenPipeline.from_pipe(loaded).known_captions == known


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        "{}",
        '{"pictures": []}',
        '{"pictures": {}, "patterns": ["{colour} cat"]}',
        '{"pictures": {}, "x": 1}',
        '{"pictures": {}, "unlearned": ["wizard"]}',
    ],
)
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / KNOWN_CAPTIONS).write_text(content)
    with pytest.raises(ValueError, match=KNOWN_CAPTIONS):
        load_known(tmp_path)


def test_a_model_loads_where_nothing_reads_its_captions(tmp_path, monkeypatch):
    pipe = tiny_llamagen.text_pipeline()
    pipe.known_captions = COMBINED
    pipe.save_pretrained(tmp_path)
    monkeypatch.setattr("arimage.pipelines.text.known.installed", lambda kind: {})
    assert AutoPipeline.from_pretrained(tmp_path).known_captions is None


def test_a_call_warns_of_every_unknown_prompt_once(tmp_path, caplog):
    pipe = tiny_llamagen.text_pipeline()
    pipe.known_captions = COMBINED
    pipe.save_pretrained(tmp_path / "zoo")
    pipe = LlamaGenPipeline.from_pretrained(tmp_path / "zoo")
    pipe.set_progress_bar_config(disable=True)
    pipe(["a green dog", "a cat", "a green dog", "a hat"], decoding="sjd")
    pipe("a green dog", decoding="sjd")
    assert caplog.messages == [
        '"a green dog" is not among the 7 pictures that zoo knows and can combine; the nearest is "dog"',
        '"a hat" is not among the 7 pictures that zoo knows and can combine; none is similar',
    ]
    caplog.clear()
    pipe.known_captions = None
    pipe("a purple dog", decoding="sjd")
    assert caplog.messages == []
