"""Pages of the documentation: their prose, their blocks of code, and the commands and snippets in them."""

import ast
import builtins
import re
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

from commands import ROOT


GUIDES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("arimage/pipelines/*/README.md")),
    *sorted(ROOT.glob("recipes/**/*.md")),
    *sorted(ROOT.glob("integrations/*/README.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    code: str


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its blocks."""
    return BLOCK.sub("", text)


def blocks(text: str) -> list[Block]:
    return [Block(language, textwrap.dedent(code)) for _, language, code in BLOCK.findall(text)]


def commands(code: str) -> list[str]:
    """The commands of a block for the shell: each is as many lines as the shell needs to read it whole."""
    found, lines = [], ""
    for line in code.splitlines(keepends=True):
        lines += line
        if lines.strip() and _is_whole(lines):
            found, lines = [*found, lines], ""
    assert not lines.strip(), lines
    return found


def _is_whole(lines: str) -> bool:
    """Whether these lines end outside of quotes, of a loop, of a continued line and of a here-document."""
    document = re.search(r"<<'(\w+)'", lines)
    if document:
        return lines.endswith(f"\n{document[1]}\n")
    try:
        words = shlex.split(lines, comments=True)
    except ValueError:
        return False
    return words.count("do") == words.count("done") and not lines.endswith("\\\n")


def defined_names(code: str) -> set[str]:
    """The names that a snippet assigns, imports or takes as arguments."""
    nodes = list(ast.walk(ast.parse(code)))
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {argument.arg for node in nodes if isinstance(node, ast.arguments) for argument in node.args}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return defined


def unknown_names(code: str) -> set[str]:
    """The names that a snippet uses and does not define."""
    used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    return used - defined_names(code) - set(dir(builtins))
