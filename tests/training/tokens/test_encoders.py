"""A tokenizer that was trained here, its tokens, and a model of them, by the commands that users give."""

import sys

import pytest
import tiny
from pipelines.var import tiny as tiny_var
from training.tokens.test_cache import class_folders
from training.tokens.test_task import DECODER, NARROW, recipe

from arimage import AutoPipeline
from arimage.cli import main as cli


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["arimage", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "pipeline, make, model, size",
    [
        ("LlamaGenPipeline", tiny.image_tokenizer, DECODER, 4 * tiny.SCALE_FACTOR),
        ("VARPipeline", lambda: tiny_var.pipeline("class").vq, NARROW, None),
    ],
)
def test_a_model_is_trained_on_the_tokens_of_a_trained_tokenizer(tmp_path, monkeypatch, pipeline, make, model, size):
    make().save_pretrained(tmp_path / "tokenizer")
    words = ["--data", class_folders(tmp_path / "data"), "--model", tmp_path / "tokenizer", "--device", "cpu"]
    words += ["--size", size] if size else []
    assert not run(monkeypatch, "train", "tokens", *words, "--out", tmp_path / "tokens")
    words = ["--recipe", recipe(tmp_path, pipeline, model), "--tokens", tmp_path / "tokens", "--steps", 2]
    assert not run(monkeypatch, "train", "model", *words, "--out", tmp_path / "run", "--device", "cpu")
    pipe = AutoPipeline.from_pretrained(tmp_path / "run" / "model")
    assert type(pipe).__name__ == pipeline and len(pipe(class_labels=0, output_type="pt").images) == 1


def test_a_tokenizer_encodes_in_float32(tmp_path, monkeypatch, capsys):
    tiny.image_tokenizer().save_pretrained(tmp_path / "tokenizer")
    words = ["--data", tmp_path, "--model", tmp_path / "tokenizer", "--dtype", "bfloat16", "--out", tmp_path / "x"]
    assert run(monkeypatch, "train", "tokens", *words) == 2
    assert "is an image tokenizer, which encodes in float32: leave out --dtype" in capsys.readouterr().err
