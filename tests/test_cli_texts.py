"""Texts that the console command reads and prints: prompts, names of files, and help."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from pipelines.cosmos import tiny as tiny_cosmos
from pipelines.emu3 import tiny as tiny_emu3
from pipelines.llamagen import tiny as tiny_llamagen
from typer.testing import CliRunner

from arimage.cli import main as cli


ROOT = Path(cli.__file__).parents[2]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, pipe in (
        ("text", tiny_llamagen.text_pipeline()),
        ("emu3", tiny_emu3.pipeline()),
        ("video", tiny_cosmos.pipeline()),
    ):
        pipe.save_pretrained(folder / name)
    return folder


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a command in an empty folder; returns its exit code and what it printed on a terminal of `encoding`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, encoding="utf-8"):
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding))
        with pytest.raises(SystemExit) as end:
            cli.main()
        sys.stdout.flush()
        return end.value.code or 0, sys.stdout.buffer.getvalue()

    return run


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


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run a command that must end with exit code 2 and one sentence; returns the sentence."""
    monkeypatch.chdir(tmp_path)

    def refused(*arguments):
        monkeypatch.setattr(sys, "argv", ["arimage", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        printed = capsys.readouterr()
        assert end.value.code == 2 and printed.out == "" and printed.err.count("\n") == 1
        assert not Path("outputs").exists()
        return printed.err

    return refused


# Prompts


@pytest.mark.parametrize(
    "arguments",
    [["generate", ""], ["generate", " \t"], ["generate", "tree", ""], ["bench", "--prompt", "tree", "--prompt", " "]],
)
def test_an_empty_prompt_is_refused_before_the_model_is_loaded(refused, monkeypatch, arguments):
    monkeypatch.setattr(cli, "load_pipeline", lambda *_, **__: pytest.fail("the model was loaded"))
    assert refused(*arguments).startswith('arimage: the prompt is empty: say what to generate, as in "a red heart"')


@pytest.mark.parametrize("text", [b"", b"\n \n", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("others", [["tree"], ["--image", "x.png"]])
def test_a_file_without_prompts_is_refused(refused, tmp_path, text, others):
    (tmp_path / "prompts.txt").write_bytes(text)
    assert "--file is prompts.txt, which holds no prompts" in refused("generate", "--file", "prompts.txt", *others)


def test_prompts_come_from_the_standard_input_without_their_byte_order_mark(run, standard_input, models):
    standard_input("\ufefftree\n\n".encode())
    code, printed = run("generate", "--file", "/dev/stdin", "--model", models / "text")
    assert code == 0 and printed.split() == [b"outputs/tree-0-0.png"]


def test_a_standard_input_without_prompts_is_refused(refused, standard_input):
    standard_input(b"\n")
    assert "holds no prompts" in refused("generate", "--file", "/dev/stdin")


@pytest.mark.every(2)
@pytest.mark.parametrize("prompt", ["\ud83d", "heart \udcff"])
@pytest.mark.parametrize(
    "arguments",
    [["generate"], ["generate", "tree", "--negative-prompt"]],
)
def test_a_prompt_that_is_not_utf8_is_refused(refused, models, prompt, arguments):
    assert "half a surrogate pair, or a byte that is not UTF-8" in refused(
        *arguments, prompt, "--model", models / "emu3", "--guidance-scale", 2
    )


def test_bytes_that_are_not_utf8_are_refused():
    command = [sys.executable, "-m", "arimage", "generate", b"c\xe2teau"]
    done = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith(
        b"arimage: the prompt 'c\\udce2teau' holds half a surrogate"
    )
    assert done.stderr.count(b"\n") == 1


@pytest.mark.every(3)
@pytest.mark.parametrize("model", ["text", "emu3", "video"])
@pytest.mark.parametrize("command", [["generate"], ["bench"]])
def test_a_class_of_a_model_without_classes_is_refused(refused, models, model, command):
    line = refused(*command, "--class-label", 1, "--model", models / model)
    assert line.startswith((f"arimage: {models / model} generates", f"arimage: {models / model} continues images"))


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "model, condition, side",
    [
        pytest.param(model, words, side, marks=[pytest.mark.slow] * ((model == "emu3") == (side in (2**40, 0))))
        for model, words in (("emu3", ["tree"]), ("video", ["--image", "x.png"]))
        for side in (10**9, 2**40, -16, 0)
    ],
)
def test_sizes_that_nothing_can_hold_are_refused(refused, models, model, condition, side):
    from PIL import Image

    Image.new("RGB", (64, 48)).save("x.png")
    for options in (["--height", side, "--width", 64], ["--height", 64, "--width", side]):
        assert "give" in refused("generate", *condition, *options, "--model", models / model)


# Names of files


@pytest.mark.parametrize("name", ["قلب.png", b"\xff.png"])
def test_a_file_is_written_though_the_terminal_cannot_show_its_name(run, models, name):
    name = os.fsdecode(name)
    code, printed = run("generate", "tree", "--model", models / "text", "--out", name, encoding="cp1252")
    assert code == 0 and printed.endswith(b".png\n") and b"\\u" in printed
    assert Path(name).is_file()


# Help


def commands(command, names=()):
    """Every command, with its names."""
    yield names, command
    for name, part in getattr(command, "commands", {}).items():
        yield from commands(part, (*names, name))


def words(text):
    """The words of a help text: tables, lines and marks of code left out."""
    return " ".join(text.replace("│", " ").replace("`", "").split())


ALL = dict(commands(typer.main.get_command(cli.app)))


@pytest.mark.every(10)
@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_help_says_all_that_was_written(names):
    # So wide that no text is broken, since the lines of a table stand next to each other.
    shown = words(CliRunner().invoke(cli.app, [*names, "--help"], env={"COLUMNS": "1000"}).output)
    for option in ALL[names].params:
        assert words(option.help or "") in shown
    for part in (ALL[names], *getattr(ALL[names], "commands", {}).values()):
        assert words((part.help or "").partition("\n\n")[0]) in shown
