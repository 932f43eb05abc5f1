"""What a user gets in a process of its own, in which nothing else has imported anything before."""

import ast
import json
import shlex
from collections import defaultdict
from collections.abc import Iterator

import pytest
import typer
from commands import ROOT, python

from arimage.cli import main as cli


FILES = sorted((ROOT / "arimage").rglob("*.py"))
# Imports the first argument, then looks up each of the other dotted names in a process of its own.
LOOK_UP = """
import importlib, os, sys, types
top = importlib.import_module(sys.argv[1])
for name in sys.argv[2:]:
    if os.fork():
        os.wait()
        continue
    found = top
    for part in name.split("."):
        if not isinstance(found, types.ModuleType):
            break
        if not hasattr(found, part):
            print(name, flush=True)
            break
        found = getattr(found, part)
    os._exit(0)
"""
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


def uses_of_submodules(source: str) -> Iterator[tuple[str, str]]:
    """Of each `import a.b`, the names a and c.d in a.c.d, unless a.c is imported in the same source."""
    nodes = list(ast.walk(ast.parse(source)))
    imports = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names = {one.asname or one.name.partition(".")[0]: one.name if one.asname else one.name.partition(".")[0]
             for one in imports}  # fmt: skip
    imported = {one.name for one in imports}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    for node in nodes:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in names:
            top = names[node.id]
            if not any(f"{module}.".startswith(f"{top}.{parts[0]}.") for module in imported):
                yield top, ".".join(parts)


def not_imported(sources: list[str]) -> set[str]:
    """The dotted names in these sources that are there only if something else imports their module."""
    used = defaultdict(set)
    for source in sources:
        for top, name in uses_of_submodules(source):
            used[top].add(name)
    found = {top: python("-c", LOOK_UP, top, *sorted(names)) for top, names in used.items()}
    assert all(done.returncode == 0 for done in found.values()), [done.stderr for done in found.values()]
    return {f"{top}.{name}" for top, done in found.items() for name in done.stdout.split()}


def commands() -> Iterator[str]:
    def walk(group, *names):
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, *names, name)
            else:
                yield " ".join((*names, name))

    return walk(typer.main.get_command(cli.app))


@pytest.mark.slow
def test_submodules_are_imported_where_they_are_used():
    assert not_imported([path.read_text("utf-8") for path in FILES]) == set()


def test_a_submodule_that_is_not_imported_is_found():
    wrong = "import huggingface_hub, xml\nhuggingface_hub.constants.HF_HOME, huggingface_hub.HfApi, xml.dom.minidom"
    right = "import xml.dom.minidom\nxml.dom.minidom.Node"
    found = not_imported([wrong, right])
    assert found >= {"huggingface_hub.constants", "xml.dom"} and "huggingface_hub.HfApi" not in found
    assert not_imported([right]) == set()


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


@pytest.mark.slow
def test_commands_that_read_results_run_in_processes_of_their_own(tmp_path):
    (tmp_path / "two.jsonl").write_text(PROMPTS)
    for command in (
        'bench --decoding ar --per-prompt 1 --metrics "" --out bench',
        "bench --decoding ar --per-prompt 1 --against bench/report.json",
        "eval generate --prompts two.jsonl --out run",
        "eval score run --metrics retrieval",
        "eval report run --baseline run --out report",
        "eval export run --format result-jsonl --out exported",
    ):
        done = python("-m", "arimage", *shlex.split(command), cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
    assert json.loads((tmp_path / "bench" / "report.json").read_text())["rows"]
