"""The blocks of docs/quickstart.md run in order, in one folder: those in Python in one process, the others in a shell.
A comment above a block says why it is not run, or that it runs in the background."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from app.server.server_kit import free_port, wait_for

from arimage import cli


ROOT = Path(cli.__file__).parents[1]
PAGE = ROOT / "docs" / "quickstart.md"
BLOCK = re.compile(r"^(?:<!-- ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Files that the page makes, and that show that a block did what the text says.
MADE = (
    *("heart.png", "fox.png", "sheet.png", "robot.png", "robot.webp", "robot-map.png", "crying.png", "heart.webp"),
    *("penguin-0.png", "penguin-1.png", "mascot/3.txt", "mascot.png", "report/report.md"),
)


class Block(NamedTuple):
    note: str
    language: str
    code: str


BLOCKS = [Block(*found) for found in BLOCK.findall(PAGE.read_text("utf-8"))]


def run_python(code: str, names: dict) -> None:
    exec(compile(code, f"{PAGE}, in\n{code}", "exec"), names)


def test_every_block_is_run_or_says_why_not():
    assert PAGE.read_text("utf-8").count("\n```") == 2 * len(BLOCKS) and len(BLOCKS) > 15
    assert {block.language for block in BLOCKS} == {"python", "bash"}
    notes = [block.note for block in BLOCKS if block.note]
    assert len(notes) == 3 and all(note.startswith("not run: ") or note == "in the background" for note in notes)


def test_the_first_block_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_python(next(block.code for block in BLOCKS if block.language == "python"), {})
    assert (tmp_path / "fox.png").is_file()


@pytest.mark.slow
def test_the_whole_page(tmp_path, monkeypatch, request, capsys):
    pytest.importorskip("openai")
    monkeypatch.chdir(tmp_path)
    port = free_port()
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path}
    shell = f'set -eo pipefail; arimage() {{ "{sys.executable}" -m arimage "$@"; }}\n'
    names: dict = {}
    for note, language, code in BLOCKS:
        code = code.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        if note.startswith("not run"):
            continue
        if language == "python":
            run_python(code, names)
        elif note:
            command = [sys.executable, "-m", *code.split(), "--port", str(port)]
            server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
            request.addfinalizer(server.kill)
            wait_for(lambda: answers(port), 300)
        else:
            subprocess.run(["bash", "-c", shell + code], env=environment, check=True, timeout=600)
    server.send_signal(signal.SIGINT)
    assert server.wait(30) == 0
    assert [name for name in MADE if not (tmp_path / name).is_file()] == []
    assert capsys.readouterr().out.startswith("256 True\n")


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.ConnectError:
        return False
