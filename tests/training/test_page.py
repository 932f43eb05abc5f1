"""docs/training.md as a reader follows it: its recipes are written, its commands run in order, in fewer steps."""

import re
import subprocess
import sys

import pytest
from commands import ROOT
from pages import blocks, commands, read


pytest.importorskip("datasets", reason="the extra `train` is not installed")
pytest.importorskip("peft", reason="the extra `lora` is not installed")

PAGE = read(ROOT / "docs" / "training.md")
# What cannot run here: published models, the Hub, and files of the reader.
ELSEWHERE = r"imagenet|llamagen-c2i|hf auth|--push-to-hub|tokens/train|clip|--data new|blob tiger|run-video|inception"
FEWER = {
    '{"train": 16, "heldout": 4}': '{"train": 3, "heldout": 1}',
    "--per-class 25": "--per-class 1",
    "--steps 100": "--steps 2",
    "--recipe first.toml --out run": "--recipe first.toml --out run --steps 2",
    "--recipe multi-scale.toml": "--recipe multi-scale.toml --steps 51",
}
MADE = ["fox.png", "adapted.png", "faster.png", "run-drafter/acceptance.json", "run/tokenizer/reconstructions.png"]


def shorter(code):
    for long, short in FEWER.items():
        code = code.replace(long, short)
    return code


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_page_run_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shell, before = f'set -eo pipefail; arimage() {{ "{sys.executable}" -m arimage "$@"; }}\n', PAGE
    for language, code in blocks(PAGE):
        text, _, before = before.partition(code)
        named = re.findall(r"`([\w-]+\.toml)`", text)
        if language == "toml" and named and "[model]" in code:
            (tmp_path / named[-1]).write_text(code)
        elif language == "python":
            exec(compile(shorter(code), "the page", "exec"), {})
        elif language == "bash":
            for command in commands(code):
                if not re.search(ELSEWHERE, command):
                    subprocess.run(["bash", "-c", shell + shorter(command)], check=True, timeout=600)
    assert [name for name in MADE if not (tmp_path / name).is_file()] == []
