"""Commands on a CUDA device: their steps are captured, and they say so."""

import json

import card
import pytest
import torch
from pipelines.llamagen import tiny as tiny_llamagen
from typer.testing import CliRunner

from arimage.cli import main as cli
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


def test_generate_captures_unless_it_is_told_not_to(model, device, tmp_path, monkeypatch):
    words = "generate", "a red heart", "--model", model, "--decoding", "ar", "--out", str(tmp_path)
    assert "captured steps" in run(*words) and device.replays
    replays = device.replays
    monkeypatch.setenv("ARIMAGE_EAGER", "1")
    assert "captured" not in run(*words) and device.replays == replays


@pytest.mark.slow
def test_results_say_how_steps_ran(model, device, tmp_path):
    bench = "bench", "--model", model, "--decoding", "ar", "--per-prompt", "1", "--metrics", "", "--out"
    assert "| steps |" not in run(*bench, str(tmp_path / "eager"), "--eager")
    table = run(*bench, str(tmp_path / "captured"), "--against", str(tmp_path / "eager" / "report.json"))
    assert "| steps |" in table and "| captured |" in table
    assert "the steps of ar were eager and are captured" in table

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
