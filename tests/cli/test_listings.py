"""`arimage models` and `arimage decodings`."""

import re
import sys
from pathlib import Path

import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import save_file

from arimage import LlamaGenPipeline, auto, decoding_names
from arimage.auto import packaged_models
from arimage.decoding.names import PRESETS
from arimage.published.registry import PUBLISHED, size_text
from arimage_emoji.known import KnownCaptions


CLASSES = ["tench", "retriever", "crane", "otter", "finch", "cock", "tabby", "Eskimo dog", "hen", "sea lion"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root, text = tmp_path_factory.mktemp("models"), tiny_llamagen.text_pipeline()
    named = LlamaGenPipeline(**tiny_llamagen.class_pipeline().components, id2label=dict(enumerate(CLASSES)))
    named.save_pretrained(root / "named")
    text.save_pretrained(root / "text")
    text.known_captions = KnownCaptions({"red heart": ["heart"], "tree": ["fir"]})
    text.save_pretrained(root / "known")
    return root


def rows(out):
    """The cells of each row of what is printed in a pipe, by the first."""
    return {line.split("\t")[0]: line.split("\t") for line in out.splitlines()}


@pytest.mark.every(4)
@pytest.mark.parametrize("command", ["models", "decodings"])
@pytest.mark.parametrize("columns", [60, 80, 120, 400])
def test_a_narrow_terminal_cuts_no_names(run, monkeypatch, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = re.sub("\x1b\\[[0-9;]*m", "", run(command)[1])
    names = PRESETS if command == "decodings" else [*packaged_models(), *(entry.name for entry in PUBLISHED)]
    assert {*names} <= {line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│")}
    assert "…" not in shown and max(map(len, shown.splitlines())) <= columns


def test_models_lists_every_name_with_its_size(run, monkeypatch, tmp_path):
    transformer, shared = tmp_path / "hearts" / "transformer", tmp_path / "others" / "vq"
    for folder, count in ((transformer, 1_500_000), (shared, 500_000)):
        folder.mkdir(parents=True)
        save_file({"weight": torch.zeros(count)}, folder / "diffusion_pytorch_model.safetensors")
    (tmp_path / "hearts" / "model_index.json").write_text("{}")
    (tmp_path / "hearts" / "shared.json").write_text('{"vq": "others/vq"}')
    monkeypatch.setattr(auto, "installed_models", lambda: {"hearts": tmp_path / "hearts"})
    code, out, err = run("models")
    assert code == 0, err
    # What it holds itself, and what it shares.
    assert rows(out)["name"][2:5] == ["parameters", "download", "disk"]
    assert rows(out)["hearts"][2:5] == ["2.0 M", "", "8.0 MB"]
    for entry in PUBLISHED:
        for part in (entry.repository, size_text(entry.download), entry.licence, f"{entry.parameters / 1e6:,.0f} M"):
            assert part in "\t".join(rows(out)[entry.name])


def test_models_lists_what_a_model_knows(run, refused, models, monkeypatch):
    code, out, _ = run("models", "emoji-arpg")
    assert code == 0 and len(out.splitlines()) == 1601 and "hot dog" in out.splitlines()
    assert run("models", models / "known")[1] == "red heart\ntree\n"
    assert out.startswith("hot dog\n") and out.splitlines().index("keycap: 0") > 1500
    # Whole words, and why a name is there.
    assert run("models", models / "known", "--search", "FIR")[1] == "tree (fir)\n"
    assert run("models", models / "known", "--search", "a red  Heart")[1] == "red heart\n"
    cats = run("models", "emoji-arpg", "--search", "cat")[1].splitlines()
    assert "cat" in cats and "grinning cat" in cats and len(cats) > 8
    assert all(re.search(r"\bcat\b", line, re.IGNORECASE) for line in cats) and not {"ID button", "snowflake"} & {
        *cats
    }
    assert run("models", models / "named")[1].splitlines()[7:9] == ["7 Eskimo dog", "8 hen"]
    assert run("models", models / "named", "--search", "lion")[1] == "9 sea lion\n"
    monkeypatch.setattr("arimage.published.fetch.load_published", lambda name, local_files_only: models / "named")
    assert run("models", "llamagen-c2i-b-256", "--search", "otter")[1] == "3 otter\n"
    assert "has no list of what it knows" in refused("models", models / "text")
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True)
    monkeypatch.setenv("COLUMNS", "60")
    lines = run("models", models / "named")[1].splitlines()
    assert 2 <= len(lines) < 10 and "sea lion" in lines[-1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["emoji-llamagen", "--search", "qqq"], "knows contains 'qqq'"),
        (["--search", "x"], "name the model"),
        (["someone/hearts"], "is a repository of the Hub"),
        (["nonesuch"], "nonesuch is neither"),
    ],
)
def test_what_cannot_be_listed_is_refused(refused, arguments, sentence):
    assert sentence in refused("models", *arguments)


def test_combined_captions_are_listed_with_their_words(run, monkeypatch):
    known = KnownCaptions({"cat": [], "[b]ox": []}, {"number": ["two", "three"]}, ["{number} cats"])
    Path("combined").mkdir()
    Path("combined/model_index.json").write_text('{"_class_name": "LlamaGenPipeline"}')
    Path("combined/known_captions.json").write_text(known.to_text())
    assert run("models", "./combined")[1] == "cat\n[b]ox\n"
    monkeypatch.setattr(sys.stdout.__class__, "isatty", lambda self: True)
    out = run("models", "./combined")[1]
    assert "[b]ox" in out and "{number} cats" in out and "number: two, three\n" in out


def test_decodings_lists_every_name_with_its_papers(run):
    code, out, _ = run("decodings")
    # In a pipe, as `cut` and `grep` read it.
    assert code == 0 and [*rows(out)] == ["name", *decoding_names()]
    assert {len(cells) for cells in rows(out).values()} == {5} and len(out.splitlines()) == 1 + len(PRESETS)
    assert rows(out)["sjd"][4] == "arXiv 2410.01699" and "refresh=gumbel" in rows(out)["sjd-gumbel"][3].split(", ")
