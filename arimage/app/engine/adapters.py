"""Adapters that requests choose by name: NAME=FILE is served as the model MODEL:NAME."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ...cli.options import parse_lora


# The name of an adapter.
NAME = re.compile(r"[\w-]+", re.ASCII)


class Active(NamedTuple):
    """The adapters that are active for a model: their names in its pipeline, their scales, and FILE:SCALE of each."""

    names: list[str]
    scales: list[float]
    texts: list[str]

    def with_one(self, name: str, source: str | Path, scale: float) -> "Active":
        """These and one more."""
        return Active([*self.names, name], [*self.scales, scale], [*self.texts, f"{source}:{scale:g}"])


def split_adapters(texts: Iterable[str]) -> tuple[list[str], dict[str, str]]:
    """The values FILE[:SCALE] of --lora, whose adapters are always active, and those of the form NAME=FILE[:SCALE],
    without the name, by name.

    Raises:
        ValueError: if two have the same name.
    """
    always, named = [], {}
    for text in texts:
        found = None if Path(text).exists() else re.fullmatch(rf"({NAME.pattern})=(.+)", text, re.ASCII)
        if found is None:
            always.append(text)
        elif found[1] in named:
            raise ValueError(f"--lora {text} has the name of another adapter: choose another")
        else:
            named[found[1]] = found[2]
    return always, named


def name_in_pipeline(name: str) -> str:
    """The name of an adapter in its pipeline. In brackets no name is part of another one or of a parameter."""
    return f"[{name}]"


def adapted_names(model: str, texts: Iterable[str]) -> list[str]:
    """The names MODEL:NAME."""
    return [f"{model}:{name}" for name in split_adapters(texts)[1]]


def active_adapters(model: str, texts: Iterable[str]) -> dict[str, Active]:
    """Which adapters are active for `model` and for each MODEL:NAME. Empty without adapters."""
    always, named = split_adapters(texts)
    if not (always or named):
        return {}
    active = Active([], [], [])
    for place, text in enumerate(always):
        # See `load_loras`.
        active = active.with_one(f"default_{place}", *parse_lora(text))
    return {model: active} | {
        f"{model}:{name}": active.with_one(name_in_pipeline(name), *parse_lora(text)) for name, text in named.items()
    }
