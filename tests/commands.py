"""The command `arimage`, in this process and in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arimage.cli import main as cli


ROOT = Path(cli.__file__).parents[2]


def outcome(capsys, *arguments) -> tuple[int, str, str]:
    """Run the command in this process; returns its exit code, output and errors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["arimage", *map(str, arguments)])
        capsys.readouterr()
        # Not `pytest.raises`, which would keep what the command has open.
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
    return code, *capsys.readouterr()


def refusal(capsys, *arguments) -> str:
    """Run a command that must end with exit code 2 and one line of errors; returns the line."""
    code, out, err = outcome(capsys, *arguments)
    assert code == 2 and out == "" and "Traceback" not in err
    assert err.count("\n") == 1 and err.endswith("\n"), err
    return err.strip()


def python(*arguments, **options) -> subprocess.CompletedProcess:
    """Run Python on the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "100"}
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment, **options)
