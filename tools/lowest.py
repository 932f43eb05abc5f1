"""Print pip's constraints to the lowest version that pyproject.toml allows of each package that users install."""

import re
import tomllib
from pathlib import Path


PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
# What only those install who work on arimage.
FOR_DEVELOPERS = ("dev", "docs", "release", "notebook")


def lowest() -> dict[str, str]:
    """Versions by package.

    Raises:
        ValueError: a requirement has no lower bound, or two.
    """
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"]]
    for extra in extras.keys() - set(FOR_DEVELOPERS):
        requirements += extras[extra]
    found = {}
    for requirement in requirements:
        if not requirement.startswith("arimage"):
            match = re.match(r"([\w-]+)(?:\[[\w,]+\])?>=([\d.]+)", requirement)
            if match is None:
                raise ValueError(f"{requirement!r} has no lower bound: begin it with >=")
            name, version = match.groups()
            if found.setdefault(name, version) != version:
                raise ValueError(
                    f"{name} has two lower bounds, {found[name]} and {version}: write the higher one twice"
                )
    return found


if __name__ == "__main__":
    for name, version in sorted(lowest().items()):
        print(f"{name}=={version}")
