"""Commands on a CUDA device: their steps are captured, and they say so."""

import json

import card
import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from typer.testing import CliRunner

from arimage import cli
from arimage.pipelines.base import ARPipeline


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "text"
    with torch.no_grad():
        tiny_llamagen.text_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(ARPipeline, "to", lambda pipe, device: card.move(pipe))
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 2**20)
    with card.card() as device:
        yield device


def run(*words: str) -> str:
    result = CliRunner().invoke(cli.app, [*words, "--device", "cuda", "--dtype", "float32"])
    assert result.exception is None, result.exception
    return result.output


def test_generate_captures_unless_it_is_told_not_to(model, device, tmp_path):
    words = "generate", "a red heart", "--model", model, "--decoding", "ar", "--out", str(tmp_path)
    assert "captured steps" in run(*words) and device.replays
    replays = device.replays
    assert "captured" not in run(*words, "--eager") and device.replays == replays
    assert "compiled steps" in run(*words, "--compile") and device.replays > replays


def test_results_say_how_steps_ran(model, device, tmp_path):
    bench = "bench", "--model", model, "--decoding", "ar", "--runs", "1", "--images", "0", "--out"
    table = run(*bench, str(tmp_path / "captured.json"))
    assert "| steps |" in table and "| captured |" in table
    assert "| steps |" not in run(*bench, str(tmp_path / "eager.json"), "--eager")
    rows = [json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("captured", "eager")]
    assert [row["steps"] for [row] in rows] == ["captured", "eager"]
    compared = CliRunner().invoke(
        cli.app, ["bench-compare", *(str(tmp_path / f"{n}.json") for n in ("eager", "captured"))]
    )
    assert "the steps of ar were eager and are captured" in compared.output

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a red heart"}\n')
    run(
        "eval",
        "generate",
        "--model",
        model,
        "--prompts",
        str(prompts),
        "--decoding",
        "ar",
        "--out",
        str(tmp_path / "run"),
    )
    [line] = (tmp_path / "run/results/rank-00000.jsonl").read_text().splitlines()
    assert json.loads(line)["steps"] == "captured"
