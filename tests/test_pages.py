"""Pages run as a reader runs them: every command and snippet from top to bottom, in one folder and one Python process
per page. What cannot run here is left out by a rule, and LEFT_OUT counts it."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections import Counter
from typing import NamedTuple

import httpx
import pytest
from app.server.server_kit import free_port, wait_for
from commands import ROOT
from pages import blocks, commands, defined_names, read, unknown_names

from arimage.published.registry import PUBLISHED


PAGES = [
    *("README", "docs/index", "docs/quickstart", "docs/choosing", "docs/decoding", "docs/all_decodings"),
    *("docs/any_order", "docs/diffusers", "docs/editing", "docs/evaluation", "docs/published_benchmarks"),
    *("docs/metrics", "docs/performance", "docs/memory", "docs/app", "docs/server", "docs/server_reference"),
    *("docs/integrations", "docs/extending", "docs/troubleshooting", "recipes/emoji/METRICS"),
]
REFERENCE = ROOT / "recipes" / "emoji" / "arimage_emoji" / "assets" / "emoji-reference"
NAMES = "|".join(re.escape(name) for entry in PUBLISHED for name in (entry.name, entry.repository))
# Why a command or a snippet cannot run here, by what it holds.
RULES = {
    "an installation": r"pip install|git clone|docker",
    "a published model": rf"\b({NAMES})\b|deepseek-community|GlmImagePipeline",
    "a download": r"wget |hf download|--download|inception|--clip|--i3d",
    "a GPU": r"\"cuda\"|CUDA_VISIBLE_DEVICES",
    "minutes of compilation": r"\.compile\(",
    "files of the reader": r"path/to|MODEL|script\.py|annotations/|train\.parquet|--data (pictures|photos)",
    "programs of others": r"evaluator\.py|evaluation/|dpg_bench/",
    "a reading of the processor": r"/proc/cpuinfo",
}
CONTINUES = "what it continues"
# Blocks that nothing runs.
DATA = ("json", "nginx")
# Files that show that the blocks of a page did what its text says.
MADE = {
    "docs/quickstart": [
        *("heart.png", "fox.png", "sheet.png", "robot.png", "robot.webp", "robot-map.png", "crying.png", "heart.webp"),
        *("penguin-0.png", "penguin-1.png", "mascot/3.txt", "mascot.png", "report/report.md"),
    ],
    "docs/editing": ["face.png", "mask.png", "crying.png"],
    "docs/decoding": ["decoding.webp", "map.png"],
    "docs/evaluation": ["comparison/report.md", "report/report.md", "exported/result.jsonl"],
    "docs/server": ["heart-0.png", "heart-1.png", "heart.mp4"],
    "docs/server_reference": ["edited.png"],
}
LEFT_OUT = {
    "README": {"an installation": 2, "a published model": 2},
    "docs/quickstart": {"an installation": 1},
    "docs/choosing": {"a published model": 3},
    "docs/all_decodings": {"a published model": 1, "files of the reader": 4},
    "docs/any_order": {"a published model": 2},
    "docs/evaluation": {"an installation": 1, "a download": 4, "a published model": 4},
    "docs/published_benchmarks": {
        "a published model": 11,
        "a download": 8,
        "what it continues": 7,
        "programs of others": 3,
        "files of the reader": 1,
    },
    "docs/metrics": {"a published model": 1, "a download": 3, "files of the reader": 1},
    "recipes/emoji/METRICS": {"a download": 1},
    "docs/performance": {"a published model": 1, "files of the reader": 1},
    "docs/memory": {
        "a published model": 5,
        "a reading of the processor": 1,
        "files of the reader": 1,
        "what it continues": 1,
    },
    "docs/app": {"an installation": 1, "a published model": 1},
    "docs/server": {"an installation": 2, "a published model": 3},
    "docs/integrations": {"a published model": 2, "an installation": 4, "a GPU": 2},
}
# Commands of hours take fewer prompts, and files of fewer.
SHORTER = {
    "--prompts emoji --per-prompt 3 --batch-size 16": "--prompts few-prompts.jsonl --metrics emoji-kid,retrieval",
    "--prompts emoji ": "--prompts few-prompts.jsonl ",
    "--prompts emoji-checks": "--prompts few-checks.jsonl",
    "--prompts emoji-videos": "--prompts few-videos.jsonl",
    "arimage reproduce emoji-llamagen": "arimage reproduce emoji-llamagen --images 4",
}


class Step(NamedTuple):
    language: str
    code: str
    reason: str | None


def steps(page: str) -> list[Step]:
    """The commands and snippets of a page, in order."""
    found: list[Step] = []
    known: set[str] = set()
    missing: set[str] = set()
    missing_files: set[str] = set()
    for language, code in blocks(read(ROOT / f"{page}.md")):
        if language in ("bash", "sh"):
            for command in commands(code):
                reason = left_out(command) or (CONTINUES if needed_files(command) & missing_files else None)
                made = set(re.findall(r"(?:--out|--local-dir) (\S+)", command))
                missing_files = missing_files | made if reason else missing_files - made
                found.append(Step("bash", command, reason))
        elif language == "python":
            reason = left_out(code) or (CONTINUES if unknown_names(code) & missing else None)
            names = defined_names(code)
            missing = missing | (names - known) if reason else missing - names
            known = known if reason else known | names
            found.append(Step("python", code, reason))
        else:
            assert language in DATA, f"{page} has a block of {language!r}"
    return found


def needed_files(command: str) -> set[str]:
    """The words of a command that may be files, with the folders that hold them."""
    words = re.findall(r"[\w.-]+(?:/[\w.-]+)*", command)
    return {"/".join(parts[:end]) for word in words for parts in [word.split("/")] for end in range(1, len(parts) + 1)}


def left_out(code: str) -> str | None:
    """Why a command or a snippet cannot run here."""
    return next((why for why, pattern in RULES.items() if re.search(pattern, code)), None)


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/").status_code == 200
    except httpx.ConnectError:
        return False


class Reader:
    """Runs the steps of a page in the current folder."""

    def __init__(self) -> None:
        self.port = free_port()
        self.names: dict = {}
        self.server: subprocess.Popen | None = None
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = os.environ | {"PYTHONPATH": path}

    def run(self, step: Step) -> None:
        code = re.sub(r"127\.0\.0\.1:(8000|7860)", f"127.0.0.1:{self.port}", step.code)
        for long, short in SHORTER.items():
            code = code.replace(long, short)
        if step.language == "python":
            exec(compile(code, step.code, "exec"), self.names)
        elif re.match(r"arimage (serve|app)\b", code):
            self.stop()
            command = [sys.executable, "-m", *shlex.split(code, comments=True), "--port", str(self.port)]
            self.server = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)
            wait_for(lambda: answers(self.port), 300)
        else:
            shell = f'set -eo pipefail; arimage() {{ "{sys.executable}" -m arimage "$@"; }}\n'
            subprocess.run(["bash", "-c", shell + code], env=self.environment, check=True, timeout=900)

    def stop(self) -> None:
        """End the server as its user does, if there is one."""
        if self.server is not None:
            self.server.send_signal(signal.SIGINT)
            assert self.server.wait(60) == 0
            self.server = None


@pytest.mark.parametrize("page", PAGES)
def test_what_is_left_out_of_a_page(page):
    reasons = Counter(step.reason for step in steps(page) if step.reason)
    assert dict(reasons) == LEFT_OUT.get(page, {})


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_from_top_to_bottom(page, tmp_path, monkeypatch, request):
    for library in ("openai", "gradio", "peft", "imageio_ffmpeg"):
        pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    for file in REFERENCE.glob("*.jsonl"):
        rows = file.read_text("utf-8").splitlines(keepends=True)
        (tmp_path / f"few-{file.name}").write_text("".join(rows[:: len(rows) // 4]), "utf-8")
    reader = Reader()
    request.addfinalizer(lambda: reader.server and reader.server.kill())
    for step in steps(page):
        if step.reason is None:
            reader.run(step)
    reader.stop()
    assert [name for name in MADE.get(page, []) if not (tmp_path / name).is_file()] == []
