"""`arimage bench`: its table, what it leaves out, and what it refuses."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from pipelines.llamagen import tiny as tiny_llamagen


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tiny_llamagen.text_pipeline().save_pretrained(root / "text")
    tiny_llamagen.class_pipeline().save_pretrained(root / "class")
    return root


def table(text):
    """The cells of the Markdown tables in `text`, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] != "decoding" and not row[0].startswith("---")]


def test_bench_prints_a_table_and_writes_every_figure(run, models):
    options = ["--decoding", "ar", "--decoding", "sjd-coupled", "--batch-size", 3, "--per-prompt", 3, "--seed", 4]
    options += ["--prompt", "tree", "--prompt", "heart", "--top-k", 5]
    code, out, _ = run("bench", "--model", models / "text", *options, "--out", "bench")
    assert code == 0
    ar, coupled = table(out)
    assert ar[:7] == ["ar", ar[1], "16.0", "1", "16.0", "1.00", "1.0"] and ar[9] == "1.00"
    assert coupled[0] == "sjd-coupled" and coupled[1].startswith("exact (0.")
    passes, ratio = (cell.split(" ± ") for cell in coupled[2:4])
    assert len(passes) == len(ratio) == 2 and float(ratio[0]) == pytest.approx(float(passes[0]) / 16, rel=0.05)
    assert "top_k 5" in out and "calls of 3" in out and torch.__version__ in out
    assert Image.open("bench/report.png").width > 500 and Path("bench/report.md").read_text("utf-8") + "\n" == out
    written = json.loads(Path("bench/report.json").read_text())
    settings = written["settings"]
    assert (settings["images"], settings["seed"], settings["sampling"]["top_k"]) == (6, 4, 5)
    assert settings["model"] == str(models / "text") and written["machine"]["torch"] == torch.__version__
    ar, coupled = written["rows"]
    assert ar["decoding"] == "ar" and ar["cost"]["passes"] == ar["cost"]["call_passes"] == 16
    assert coupled["exact"] is True and 2 <= coupled["cost"]["passes"] <= 16
    assert coupled["settings"]["refresh"] == "coupled" and coupled["cost"]["timed_calls"] == 2


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options, word",
    [
        (["--per-prompt", 0], "--per-prompt is 0"),
        (["--batch-size", 0], "--batch-size is 0"),
        (["--batch-size", 10**9], "--batch-size"),
        (["--decoding", "sdj"], "sdj"),
        (["--decoding", "sjd:window"], "write it as key=value"),
        (["--decoding", "sjd:windows=3"], "no setting 'windows'"),
        (["--decoding", "sjd:window=0"], "window is 0"),
        (["--metrics", "deviation,is"], "unknown metric"),
        (["--prompt", "tree", "--class-label", 1], "exclude each other"),
        (["--prompts", "nonesuch.jsonl"], "nonesuch.jsonl"),
        (["--against", "missing.json"], "arimage bench --out"),
        (["--out", "/dev/null/x"], "--out"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(refused, models, options, word):
    assert word in refused("bench", "--model", models / "text", *options)
