"""Runs with adapters: which ones count as the same."""

import pytest
from adapters import adapter
from eval.runs.run_kit import BATCH
from pipelines.llamagen import tiny as tiny_llamagen
from safetensors.torch import load_file, save_file

from arimage.eval.runs.run_folder import read_config


pytest.importorskip("peft", reason="the extra `lora` is not installed")


@pytest.fixture
def run(command, tmp_path):
    """Generate a run with an adapter; returns the exit code and what was said."""
    pipe = tiny_llamagen.text_pipeline()
    pipe.save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a red heart\ntree\n")
    for name, seed in (("style", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        save_file(adapter(pipe, seed=seed), tmp_path / name / "best.safetensors")

    def run(lora, out="run"):
        words = ["--model", tmp_path / "model", "--prompts", tmp_path / "prompts.txt", "--batch-size", BATCH]
        return command(*words, "--device", "cpu", "--lora", tmp_path / lora, "--out", tmp_path / out)

    return run


@pytest.mark.slow
def test_a_run_is_resumed_with_its_own_adapter_only(run, tmp_path):
    assert run("style/best.safetensors")[0] == 0
    assert read_config(tmp_path / "run")["lora"] == ["best.safetensors:1"]
    assert run("style/best.safetensors:1.0")[0] == 0
    code, said = run("style/best.safetensors:0.5")
    assert code == 2 and "lora = ['best.safetensors:1'] and you ask for ['best.safetensors:0.5']" in said
    # Another file of the same name.
    code, said = run("other/best.safetensors")
    assert code == 2 and "weights" in said
    # It may differ in a single value.
    state = load_file(tmp_path / "style" / "best.safetensors")
    largest = max((name for name in state if "lora_" in name), key=lambda name: state[name].numel())
    state[largest].view(-1)[-2] += 0.5
    save_file(state, tmp_path / "other" / "best.safetensors")
    code, said = run("other/best.safetensors")
    assert code == 2 and "weights" in said
