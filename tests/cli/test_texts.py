"""Texts that the console command reads and prints: prompts and names of files."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.llamagen import tiny as tiny_llamagen

from arimage.cli import generate as generating
from arimage.cli import main as cli


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tiny_llamagen.text_pipeline().save_pretrained(folder / "text")
    tiny_emu3.pipeline().save_pretrained(folder / "emu3")
    tiny_cosmos.pipeline().save_pretrained(folder / "video")
    return folder


@pytest.fixture
def standard_input(tmp_path):
    """Let the standard input of this process hold bytes."""
    before = os.dup(0)

    def standard_input(content):
        path = tmp_path / "standard-input"
        path.write_bytes(content)
        with path.open("rb") as file:
            os.dup2(file.fileno(), 0)

    yield standard_input
    os.dup2(before, 0)
    os.close(before)


# Prompts


@pytest.mark.parametrize(
    "arguments",
    [["generate", ""], ["generate", " \t"], ["generate", "tree", ""], ["bench", "--prompt", "tree", "--prompt", " "]],
)
def test_an_empty_prompt_is_refused_before_the_model_is_loaded(refused, monkeypatch, arguments):
    monkeypatch.setattr(generating, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    assert "the prompt is empty: say what to generate" in refused(*arguments)
    assert not Path("outputs").exists()


@pytest.mark.parametrize("text", [b"", b"\n \n", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("others", [["tree"], ["--image", "x.png"]])
def test_a_file_without_prompts_is_refused(refused, standard_input, tmp_path, text, others):
    (tmp_path / "prompts.txt").write_bytes(text)
    standard_input(text)
    for file in ("prompts.txt", "/dev/stdin"):
        assert f"{file} holds no prompts" in refused("generate", "--prompts", file, *others)


def test_prompts_come_from_the_standard_input_without_their_byte_order_mark(run, standard_input, models):
    standard_input("\ufefftree\n\n".encode())
    code, printed, _ = run("generate", "--prompts", "/dev/stdin", "--model", models / "text")
    assert code == 0 and printed.split() == ["outputs/tree-0.png"]


@pytest.mark.every(2)
@pytest.mark.parametrize("prompt", ["\ud83d", "heart \udcff"])
@pytest.mark.parametrize("arguments", [["generate"], ["generate", "tree", "--negative-prompt"]])
def test_a_prompt_that_is_not_utf8_is_refused(refused, models, prompt, arguments):
    sentence = refused(*arguments, prompt, "--model", models / "emu3", "--guidance-scale", 2)
    assert "half a surrogate pair, or a byte that is not UTF-8" in sentence


def test_bytes_that_are_not_utf8_are_refused():
    command = [sys.executable, "-m", "arimage", "generate", b"c\xe2teau"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert done.stderr.startswith(b"arimage: the prompt 'c\\udce2teau' holds half a surrogate")


@pytest.mark.every(3)
@pytest.mark.parametrize("model", ["text", "emu3", "video"])
@pytest.mark.parametrize("command", [["generate"], ["bench"]])
def test_a_class_of_a_model_without_classes_is_refused(refused, models, model, command):
    line = refused(*command, "--class-label", 1, "--model", models / model)
    assert line.startswith((f"arimage: {models / model} generates", f"arimage: {models / model} continues images"))


# Names of files


@pytest.mark.parametrize("name", ["قلب.png", b"\xff.png"])
def test_a_file_is_written_though_the_terminal_cannot_show_its_name(models, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    name, model = os.fsdecode(name), str(models / "text")
    monkeypatch.setattr(sys, "argv", ["arimage", "generate", "tree", "--model", model, "--out", name])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
    with pytest.raises(SystemExit) as end:
        cli.main()
    sys.stdout.flush()
    printed = sys.stdout.buffer.getvalue()
    assert not end.value.code and printed.endswith(b".png\n") and b"\\u" in printed
    assert Path(name).is_file()
