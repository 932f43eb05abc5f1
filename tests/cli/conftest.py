"""The command in this process, in an empty folder."""

from functools import partial

import pytest
from commands import outcome, refusal


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """Run the command in an empty folder; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    return partial(outcome, capsys)


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Run a command that must end with exit code 2 and one line of errors, in an empty folder; returns the line."""
    monkeypatch.chdir(tmp_path)
    return partial(refusal, capsys)
