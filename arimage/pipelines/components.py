"""Whether the components of a pipeline fit each other."""

from typing import Any

from torch import nn


def check_parts(quantity: str, **values: Any) -> None:
    """Refuse two components, by their names, whose values of a quantity differ."""
    (first, one), (second, other) = values.items()
    if one != other:
        first, second = (name.replace("_", " ") for name in (first, second))
        raise ValueError(
            f"{quantity}: the {first} has {one}, the {second} {other}: load the two that were trained together"
        )


def check_settings(*settings: str, **parts: nn.Module | None) -> None:
    """Refuse two components, by their names, whose configs differ in one of the settings. Either may be missing."""
    if None not in parts.values():
        for name in settings:
            check_parts(name, **{part: module.config[name] for part, module in parts.items()})  # pyright: ignore
