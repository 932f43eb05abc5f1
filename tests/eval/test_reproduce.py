"""`arimage reproduce`: its rows, what it refuses, and a figure of a small model."""

import numpy as np
import pytest
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.eval import protocol as protocols
from arimage.eval.protocol import describe, find_protocol, load_protocols
from arimage.eval.reproduce import check_decoding, manifest_of, report_text, reproduce
from arimage.published.registry import find_published


ROWS = load_protocols()


def test_every_model_with_a_published_figure_has_a_row():
    models = {name.partition(":")[0] for name in ROWS}
    families = ("llamagen-c2i", "var-", "arpg", "lpd", "randar", "mar", "janus", "emu3", "lumina", "infinity", "emoji")
    assert all(any(name.startswith(family) for name in models) for family in families)
    assert len(ROWS) == 52


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ROWS)
def test_every_row_dry_runs(name, command):
    model, _, protocol = name.partition(":")
    code, out, _ = command("reproduce", model, "--dry-run", *(["--protocol", protocol] if protocol else []))
    assert code == 0
    words = ("images:", "passes:", "hours:", "band:", "source:")
    assert all(word in out for word in words) and f"{ROWS[name].number:,} of" in out


@pytest.mark.parametrize("name", ROWS)
def test_rows_name_models_and_decodings_that_exist(name):
    row, model = ROWS[name], name.partition(":")[0]
    assert (find_published(model) is not None) + (row.folder is not None) + model.startswith("emoji-") == 1
    check_decoding(row, None, False)
    assert row.decoding != "" and row.band() >= 0


def test_a_dry_run_counts_images_passes_and_hours():
    row = ROWS["var-d36-512"]
    text = describe("var-d36-512", row, 50_000, row.decoding, 50, 2.0, 100.0)
    assert "images: 50,000 of 512x512 pixels" in text and "passes: 10,000 forward passes" in text
    billions = find_published("var-d36-512").parameters / 1e9
    assert f"{10_000 * 2 * billions / 2000 / 3600:.2g} to read" in text
    assert f"{50_000 * 2240 * 4 * billions / 100_000 / 3600:.2g} to compute" in text


def test_names_are_found_or_listed(command, refused):
    assert find_protocol("lpd-l-256", "20")[0] == "lpd-l-256:20"
    assert "20, 32" in refused("reproduce", "lpd-l-256")
    assert "choose among" in refused("reproduce", "nonesuch")
    assert "lpd-l-256:32: fid 2.29" in command("reproduce")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llamagen-c2i-b-256", "--dry-run", "--decoding", "zipar"], "lossy"),
        (["llamagen-c2i-b-384", "--dry-run", "--images", "50001"], "uses 50,000 images"),
        (["llamagen-c2i-b-384", "--dry-run", "--images", "1500"], "multiple"),
        (["emoji-llamagen", "--protocol", "ar", "--dry-run", "--images", "400"], "multiple"),
        (["janus-1.3b", "--protocol", "geneval", "--dry-run", "--images", "553"], "all its prompts"),
        (["llamagen-c2i-b-384"], "--out is missing"),
        (["mar-b", "--out", "x"], "--model, a folder"),
    ],
)
def test_other_settings_are_refused(arguments, message, refused):
    assert message in refused("reproduce", *arguments)


def test_exact_decodings_and_the_authors_own_are_taken():
    row = ROWS["llamagen-c2i-b-384"]
    assert check_decoding(row, "sjd-coupled", False) == "sjd-coupled"
    assert check_decoding(row, "zipar", True) == "zipar"
    assert check_decoding(ROWS["lpd-l-256:20"], "groups:groups=20", False) == "groups:groups=20"


def test_benchmarks_need_all_of_their_prompts(tmp_path):
    row = ROWS["janus-1.3b:geneval"]
    with pytest.raises(ValueError, match="evaluation_metadata.jsonl"):
        manifest_of(row, row.number, None, 0)
    (tmp_path / "some.txt").write_text("a red heart\n")
    with pytest.raises(ValueError, match="has 1 prompts, and geneval has 553"):
        manifest_of(row, row.number, str(tmp_path / "some.txt"), 0)
    with pytest.raises(ValueError, match="all its prompts"):
        manifest_of(row, 10, str(tmp_path / "some.txt"), 0)


def test_images_are_spread_over_classes_and_prompts():
    rows, _ = manifest_of(ROWS["llamagen-c2i-b-256"], 2000, None, 0)
    assert len(rows) == 2000 and len({row["class_label"] for row in rows}) == 1000
    rows, _ = manifest_of(ROWS["emoji-llamagen:ar"], 1008, None, 0)
    assert len(rows) == 1008 and len({row["prompt"] for row in rows}) <= 336
    rows, _ = manifest_of(ROWS["emoji-llamagen:ar"], 672, None, 0)
    assert len(rows) == 672 and len({row["prompt"] for row in rows}) == 336
    rows, _ = manifest_of(ROWS["emoji-llamagen:ar"], 48, None, 0)
    assert len(rows) == 48 and len({row["metadata"]["name"] for row in rows}) > 40


def entry(value, error=0.01):
    return {"value": value, "standard_error": error}


def test_verdicts():
    row = ROWS["llamagen-c2i-l-384"]
    assert row.band() == 0.1 and ROWS["llamagen-c2i-b-256"].band() == pytest.approx(0.03 * 5.46)
    for fid, verdict in ((3.16, "inside"), (3.18, "outside"), (2.96, "outside")):
        assert f"| {verdict} |" in report_text("x", row, "ar", 50_000, {"fid": entry(fid)}, None)
    assert "too high by what fewer images add" in report_text("x", row, "ar", 10_000, {"fid": entry(3.1)}, None)
    assert "lossy" in report_text("x", row, "zipar", 50_000, {"fid": entry(3.1)}, None)
    emoji = ROWS["emoji-llamagen:ar"]
    assert emoji.band(0.02) == pytest.approx(3 * np.hypot(emoji.expected_error, 0.02))
    one_prompt = report_text("x", emoji, "ar", 1, {"retrieval": entry(1.0, None)}, None)
    assert "| none: a figure of one prompt" in one_prompt and "± 0" not in one_prompt.split("here")[1].split("band")[0]


def test_a_packaged_row_is_generated_scored_and_reported(tmp_path, command):
    pipe = tiny_llamagen.text_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    row = ROWS["emoji-llamagen:sjd-coupled"]
    options = {"decoding": "ar", "images": 4, "model": str(tmp_path / "model"), "batch_size": 4, "device": "cpu"}
    text, outside = reproduce("emoji-llamagen:sjd-coupled", row, tmp_path / "out", **options)
    assert outside and "| outside |" in text
    assert "| retrieval | 0.968 |" in text and "emoji-kid" in text
    assert (tmp_path / "out" / "report.md").read_text() == text
    words = ["emoji-llamagen", "--protocol", "sjd-coupled", "--decoding", "ar", "--images", 4, "--batch-size", 4]
    code, out, _ = command(
        "reproduce", *words, "--model", tmp_path / "model", "--out", tmp_path / "out", "--device", "cpu"
    )
    assert code == 3 and out == text + "\n"


def test_images_of_classes_are_exported_without_a_reference(tmp_path, monkeypatch):
    monkeypatch.setattr(protocols.Protocol, "number", property(lambda row: 6))
    tiny_llamagen.class_pipeline().save_pretrained(tmp_path / "model")
    row = ROWS["llamagen-c2i-b-256"].model_copy(update={"size": 8, "score_size": 8, "decoding": "ar"})
    options = {"decoding": "ar", "model": str(tmp_path / "model"), "batch_size": 3, "device": "cpu"}
    text, outside = reproduce("llamagen-c2i-b-256", row, tmp_path / "out", **options)
    assert not outside
    assert "evaluator.py" in text and np.load(tmp_path / "out" / "images.npz")["arr_0"].shape == (6, 8, 8, 3)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("class", "arpg-1b-256:arccos", "takes no order"),
        ("class", "mar-b", "takes no num_inference_steps"),
        ("class", "llamagen-c2i-b-256", "from 0 to 9"),
        ("class", "emoji-llamagen:ar", "generates classes"),
        ("text", "llamagen-c2i-b-256", "generates from text"),
    ],
)
def test_another_model_than_that_of_the_figure_is_refused_and_leaves_nothing(kind, name, message, command, tmp_path):
    (tiny_llamagen.class_pipeline if kind == "class" else tiny_llamagen.text_pipeline)().save_pretrained(
        tmp_path / "m"
    )
    model, _, protocol = name.partition(":")
    asked = [*(["--protocol", protocol] if protocol else []), "--images", 4 if "emoji" in name else 1000]
    places = ["--model", tmp_path / "m", "--out", tmp_path / "out", "--device", "cpu"]
    code, _, error = command("reproduce", model, *asked, *places)
    assert code == 2 and message in error and "which cannot reproduce" in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()
