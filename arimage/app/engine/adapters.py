"""Adapters that requests choose by name: NAME=FILE is served as the model MODEL:NAME."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...cli.options import parse_lora


# The names and scales of the adapters that are active for a model, by the name of the model.
Active = Mapping[str, tuple[list[str], list[float]]]
# The name of an adapter.
NAME = re.compile(r"[\w-]+", re.ASCII)


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


def active_adapters(model: str, texts: Iterable[str]) -> Active:
    """Which adapters are active for `model` and for each MODEL:NAME. Empty without adapters."""
    always, named = split_adapters(texts)
    if not (always or named):
        return {}
    # See `load_loras`.
    names, scales = [f"default_{place}" for place in range(len(always))], [parse_lora(text)[1] for text in always]
    return {model: (names, scales)} | {
        f"{model}:{name}": ([*names, name_in_pipeline(name)], [*scales, parse_lora(text)[1]])
        for name, text in named.items()
    }
