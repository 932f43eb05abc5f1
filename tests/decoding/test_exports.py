"""The lazy names of `arimage.decoding` exist, and its stub lists them for editors and type checkers."""

import ast
from pathlib import Path

from arimage import decoding
from arimage.decoding.exports import EXPORTS


def test_the_stub_lists_the_exports():
    stub = Path(decoding.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in imports for alias in node.names} == EXPORTS
    assert stub.rstrip().endswith("\n".join([*map('    "{}",'.format, decoding.__all__), "]"]))


def test_every_name_exists():
    assert all(getattr(decoding, name) is not None for name in decoding.__all__)
    assert set(decoding.__all__) <= set(dir(decoding))
