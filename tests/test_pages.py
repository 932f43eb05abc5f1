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
from adapters import adapter
from app.server.server_kit import free_port, wait_for
from commands import ROOT
from pages import GUIDES, blocks, commands, defined_names, name, read, unknown_names
from safetensors.torch import save_file

from arimage import AutoPipeline
from arimage.published.registry import PUBLISHED


# Pages that tests/training/test_page.py runs, that train or measure for hours, or are about other environments.
ELSEWHERE = (
    r"docs/(training|training_reference|installation)|recipes/emoji/(TRAINING|REPRODUCE)|benchmarks/.*|integrations/.*"
)
REFERENCE = ROOT / "recipes" / "emoji" / "arimage_emoji" / "assets" / "emoji-reference"
NAMES = "|".join(re.escape(name) for entry in PUBLISHED for name in (entry.name, entry.repository))
# Why a command or a snippet cannot run here, by what it holds.
RULES = {
    "an installation": r"pip install|git clone|docker",
    "a published model": rf"\b({NAMES})\b|deepseek-community|GlmImagePipeline",
    "a download": r"wget |hf download|--download|inception|--clip|--i3d|iconify",
    "files of the authors": r"arimage convert",
    "a GPU": r"\"cuda\"|CUDA_VISIBLE_DEVICES",
    "minutes of compilation": r"\.compile\(",
    "files of the reader": r"path/to|MODEL|script\.py|annotations/|\.parquet|--data (photos|(?i:data))|--tokens",
    "programs of others": r"evaluator\.py|evaluation/|dpg_bench/",
    "a reading of the processor": r"/proc/cpuinfo",
}
CONTINUES = "what it continues"
# Blocks that nothing runs.
DATA = ("json", "nginx", "toml", "")
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
    "docs/lora": ["styled/manifest.jsonl", "styled-model/model_index.json", "style/pytorch_lora_weights.safetensors"],
    "recipes/emoji/arimage_emoji/assets/emoji-latent-llama/README": ["faces/report.md"],
    "recipes/icons/arimage_icons/assets/icons-maskgit/README": ["few-icons/report.md"],
}
LEFT_OUT = {
    "README": {"an installation": 2, "a published model": 2},
    "docs/quickstart": {"an installation": 1},
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
    "arimage/pipelines/arpg/README": {"files of the authors": 1},
    "arimage/pipelines/cosmos/README": {
        "a published model": 3,
        "a download": 1,
        "files of the authors": 1,
        "an installation": 1,
        "what it continues": 1,
    },
    "arimage/pipelines/distilled_decoding/README": {
        "files of the authors": 2,
        "files of the reader": 1,
        "what it continues": 1,
    },
    "arimage/pipelines/latent_llama/README": {"files of the reader": 2},
    "arimage/pipelines/var/README": {"files of the authors": 1, "a published model": 1, "files of the reader": 2},
    "recipes/emoji/README": {"an installation": 1},
    "recipes/emoji/arimage_emoji/assets/emoji-llamagen/README": {"files of the reader": 1},
    "recipes/icons/README": {"an installation": 2, "a download": 3, "files of the reader": 22, "what it continues": 2},
    "recipes/icons/arimage_icons/assets/icons-arpg/README": {"files of the reader": 2},
    "recipes/icons/arimage_icons/assets/icons-llamagen/README": {"files of the reader": 2},
    "recipes/icons/arimage_icons/assets/icons-maskgit/README": {"files of the reader": 2},
}
# Commands of hours take fewer prompts, and files of fewer.
SHORTER = {
    "--prompts emoji --per-prompt 3 --batch-size 16": "--prompts few-prompts.jsonl --metrics emoji-kid,retrieval",
    "--prompts emoji ": "--prompts few-prompts.jsonl ",
    "--prompts emoji-checks": "--prompts few-checks.jsonl",
    "--prompts emoji-videos": "--prompts few-videos.jsonl",
    "--prompts recipes/icons/common.txt": "--prompts few-common.txt",
    "awk 'NR % 12 == 1' recipes": "awk 'NR % 100 == 1' recipes",
    "head -8 recipes": "head -2 recipes",
    "arimage models emoji-latent-llama |": "arimage models emoji-latent-llama | tail -4 |",
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
            files = needed_files(" ".join(re.findall(r'"(\S+)"', code)))
            reason = left_out(code) or (CONTINUES if unknown_names(code) & missing or files & missing_files else None)
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


PAGES = [
    page
    for page in (name(file).removesuffix(".md") for file in GUIDES)
    if not re.fullmatch(ELSEWHERE, page) and any(step.reason is None for step in steps(page))
]


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
    for file in (*REFERENCE.glob("*.jsonl"), ROOT / "recipes" / "icons" / "common.txt"):
        rows = file.read_text("utf-8").splitlines(keepends=True)
        (tmp_path / f"few-{file.name}").write_text("".join(rows[:: len(rows) // 4]), "utf-8")
    if page == "docs/lora":
        save_file(adapter(AutoPipeline.from_pretrained("emoji-llamagen"), size=0.01), "style.safetensors")
    reader = Reader()
    request.addfinalizer(lambda: reader.server and reader.server.kill())
    for step in steps(page):
        if step.reason is None:
            reader.run(step)
    reader.stop()
    assert [name for name in MADE.get(page, []) if not (tmp_path / name).is_file()] == []
