"""Help: at once, of every command, in panels."""

import re
import resource

import pytest
import typer
from commands import python
from typer.testing import CliRunner

from arimage import __version__
from arimage.cli import main as cli


def commands(command, names=()):
    """Every command, by its names."""
    found = {names: command}
    for name, part in getattr(command, "commands", {}).items():
        found |= commands(part, (*names, name))
    return found


ALL = commands(typer.main.get_command(cli.app))


def words(text):
    """The words of a help text: tables, lines and marks of code left out."""
    return " ".join(text.replace("│", " ").replace("`", "").split())


def options_by_panel(help: str) -> dict[str, list[str]]:
    panels: dict[str, list[str]] = {}
    for line in help.splitlines():
        if title := re.match(r"╭─ ([A-Za-z ]+) ─", line):
            panels[title[1]] = []
        elif option := re.match(r"│ [* ]? *(--[a-z-]+)", line):
            panels[[*panels][-1]].append(option[1])
    return panels


def test_help_comes_at_once_and_without_heavy_imports():
    python("-m", "arimage", "--help")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = python("-X", "importtime", "-m", "arimage", "--help")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5 and done.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert imported & {"torch", "diffusers", "transformers", "numpy", "PIL", "huggingface_hub"} == set()


@pytest.mark.every(10)
@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_help_says_all_that_was_written(names):
    # So wide that no text is broken, since the lines of a table stand next to each other.
    shown = words(CliRunner().invoke(cli.app, [*names, "--help"], env={"COLUMNS": "1000"}).output)
    for option in ALL[names].params:
        assert words(option.help or "") in shown
    for part in (ALL[names], *getattr(ALL[names], "commands", {}).values()):
        assert words((part.help or "").partition("\n\n")[0]) in shown


def test_the_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"arimage {__version__}\n", "")


def test_help_groups_the_options_of_a_command(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    panels = options_by_panel(run("generate", "--help")[1])
    assert [*panels] == ["Arguments", "Options", "Image", "Sampling", "Decoding", "Editing", "Video", "Output"]
    every = [option for options in panels.values() for option in options]
    assert len(every) == len(set(every)) and {"--prompts", "--per-prompt", "--order", "--mask-image"} <= set(every)
    for command in ("bench", "serve", "train lora", "eval generate"):
        panels = options_by_panel(run(*command.split(), "--help")[1])
        assert len(panels) > 3 and max(map(len, panels.values())) <= 8
    for name in ("generate", "bench", "serve"):
        assert sum(parameter.param_type_name == "option" for parameter in ALL[name,].params) <= 36


def test_every_command_that_loads_a_model_has_a_dtype():
    options = {names: {option for one in command.params for option in one.opts} for names, command in ALL.items()}
    # That of a figure belongs to its protocol.
    del options["reproduce",]
    loading = [found for found in options.values() if {"--model", "--device"} <= found]
    assert len(loading) > 8 and all("--dtype" in found for found in loading)
