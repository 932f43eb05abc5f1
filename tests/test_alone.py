"""What a user gets in a process of its own, in which nothing else has imported anything before."""

from collections.abc import Iterator

import pytest
import typer
from commands import ROOT, python

from arimage.cli import main as cli


FILES = sorted((ROOT / "arimage").rglob("*.py"))
# Imports what our modules import of others, then each of ours in a process of its own.
IMPORT = """
import importlib, os, sys, traceback
import torch, pydantic, typer, PIL.Image
from diffusers import AutoencoderKL, ConfigMixin, DiffusionPipeline, ModelMixin
from transformers import PreTrainedModel, PreTrainedTokenizerFast, T5EncoderModel
for name in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    try:
        importlib.import_module(name)
    except BaseException:
        print(name, traceback.format_exc(), flush=True)
    os._exit(0)
"""
HELP = """
import os, sys
from arimage.cli import main as cli
for command in sys.argv[1:]:
    if os.fork():
        if os.waitstatus_to_exitcode(os.wait()[1]):
            print(command, flush=True)
        continue
    sys.argv = ["arimage", *command.split(), "--help"]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        cli.main()
    except SystemExit as end:
        os._exit(end.code or 0)
    except BaseException:
        pass
    os._exit(1)
"""


def commands() -> Iterator[str]:
    def walk(group, *names):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, *names, name)
            else:
                yield " ".join((*names, name))

    return walk(typer.main.get_command(cli.app))


def modules() -> list[str]:
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    done = python("-c", IMPORT, *modules())
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_every_command_explains_itself_alone():
    names = list(commands())
    done = python("-c", HELP, *names)
    assert len(names) > 30 and (done.returncode, done.stdout) == (0, "")


PROMPTS = '{"prompt": "a red heart", "name": "red heart"}\n{"prompt": "a taco", "name": "taco"}\n'
SLOW = pytest.mark.slow
RUNS = [
    "models",
    "models emoji-arpg",
    "decodings",
    "reproduce",
    pytest.param("reproduce emoji-arpg --protocol ar --dry-run", marks=SLOW),
    pytest.param("generate pizza --out x.png", marks=SLOW),
    pytest.param("generate pizza --model emoji-video-blocks --out x.webp", marks=SLOW),
    pytest.param("bench --decoding sjd-coupled --per-prompt 1 --out bench", marks=SLOW),
    pytest.param("eval generate --prompts two.jsonl --out run", marks=SLOW),
    pytest.param("bench --prompts two.jsonl --metrics retrieval --decoding sjd-coupled --out both", marks=SLOW),
]


@pytest.mark.every(2)
@pytest.mark.parametrize("command", RUNS)
def test_a_command_runs_in_a_process_of_its_own(command, tmp_path):
    (tmp_path / "two.jsonl").write_text(PROMPTS)
    done = python("-m", "arimage", *command.split(), cwd=tmp_path)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_threads_of_a_command_sleep_while_they_wait(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    done = python("-m", "arimage", "env")
    assert done.returncode == 0 and "- OMP_WAIT_POLICY: passive\n" in done.stdout
