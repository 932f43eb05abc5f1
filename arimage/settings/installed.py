"""What other installed distributions add to arimage, by their entry points: models, recipes, prompts, metrics and
published figures. No heavy imports."""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path


KINDS = ("models", "recipes", "prompts", "metrics", "protocols", "captions")
# Names of models that begin so belong to a distribution of this project.
DISTRIBUTIONS = {"emoji-": "arimage-emoji", "icons-": "arimage-icons"}


@dataclass(frozen=True)
class Prompts:
    """A file of prompts that has a name, and the metrics of its images, as `arimage eval score` takes them."""

    path: Path
    metrics: list[str] = field(default_factory=list)


@cache
def installed(kind: str) -> dict[str, EntryPoint]:
    """The entry points of the group arimage.`kind` by their names: "models", "recipes" and "protocols" are folders of
    models and of .toml files, "prompts" are `Prompts`, "metrics" functions of a `Job`, and "captions" what reads a
    known_captions.json."""
    return {entry.name: entry for entry in entry_points(group=f"arimage.{kind}")}


def installed_files(kind: str, pattern: str) -> list[Path]:
    """The files of a pattern in the folders of a group."""
    return sorted(path for entry in installed(kind).values() for path in entry.load().glob(pattern))


def installed_packages() -> set[str]:
    """The names of the packages that add something."""
    return {entry.module.partition(".")[0] for kind in KINDS for entry in installed(kind).values()}


def installed_models() -> dict[str, Path]:
    """The folders of the installed models, by their names."""
    return {index.parent.name: index.parent for index in installed_files("models", "*/model_index.json")}


def not_installed(name: str) -> str | None:
    """What to install to have something of this name; None if no distribution of this project has such names."""
    for start, distribution in DISTRIBUTIONS.items():
        if name.startswith(start) and distribution.replace("-", "_") not in installed_packages():
            extra = distribution.removeprefix("arimage-")
            return (
                f'{name} belongs to {distribution}, which is not installed: run `pip install "arimage[{extra}]"`, or '
                "name another model with --model"
            )
    return None
