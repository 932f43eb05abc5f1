"""Every command of docs/evaluation.md is one that this version takes."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from arimage import cli


TEXT = (Path(cli.__file__).parents[1] / "docs" / "evaluation.md").read_text(encoding="utf-8")
COMMANDS = sorted(set(re.findall(r"(?:^ *|-m |`)arimage ([^`\n]+)", TEXT.replace("\\\n", " "), flags=re.MULTILINE)))


def test_there_are_commands():
    assert len(COMMANDS) > 15 and any("--engine ray" in command for command in COMMANDS)


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--" in command])
def test_its_options_are_known_and_complete(command):
    group, arguments = typer.main.get_command(cli.app), shlex.split(command)
    while hasattr(group, "commands"):
        group = group.commands[arguments.pop(0)]
    group.make_context("arimage", arguments)
