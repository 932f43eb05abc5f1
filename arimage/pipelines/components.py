"""Whether the components of a pipeline fit each other."""

from typing import Any


def check_parts(quantity: str, **values: Any) -> None:
    """Refuse two components, by their names, whose values of a quantity differ.

    Raises:
        ValueError: if they differ.
    """
    (first, one), (second, other) = values.items()
    if one != other:
        first, second = (name.replace("_", " ") for name in (first, second))
        raise ValueError(
            f"{quantity}: the {first} has {one}, the {second} {other}: load the two that were trained together"
        )
