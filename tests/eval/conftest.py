"""The command in this process."""

from functools import partial

import pytest
from commands import outcome, refusal


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """What commands keep for each other is not that of the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def command(capsys):
    """Run `arimage`; returns its exit code, output and errors."""
    return partial(outcome, capsys)


@pytest.fixture
def refused(capsys):
    """Run a command that must end with exit code 2 and one line of errors; returns the line."""
    return partial(refusal, capsys)
