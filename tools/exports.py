"""Write the stubs of `arimage` and `arimage.convert`, which tell editors and type checkers their lazy exports."""

from pathlib import Path
from types import ModuleType

import arimage
import arimage.convert
import arimage.decoding


PACKAGES = {arimage: ".", arimage.convert: "..", arimage.decoding: "."}
LINE_LENGTH = 119


def stub_file(package: ModuleType) -> Path:
    return Path(str(package.__file__)).with_suffix(".pyi")


def stub(package: ModuleType) -> str:
    """The contents of a package's stub."""
    names: dict[str, list[str]] = {}
    for name, module in package._exports().items():
        names.setdefault(module, []).append(name)
    lines = ["# Written by tools/exports.py.", "# ruff: noqa: I001", ""]
    for module in sorted(names):
        # Constants, classes, functions, as the imports of other files.
        listed = sorted(names[module], key=lambda name: (not name.isupper(), not name[0].isupper(), name.lower()))
        # A name "as" itself is exported.
        listed = [f"{name} as {name}" for name in listed]
        line = f"from {PACKAGES[package]}{module} import {', '.join(listed)}"
        if len(line) > LINE_LENGTH:
            line = "\n".join([f"from {PACKAGES[package]}{module} import (", *map("    {},".format, listed), ")"])
        lines.append(line)
    lines += ["", "__version__: str"] if "__version__" in package.__all__ else []
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    for package in PACKAGES:
        stub_file(package).write_text(stub(package), encoding="utf-8")
