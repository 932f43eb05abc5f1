"""Checks of settings, shared by the decodings."""

from collections.abc import Callable
from numbers import Real
from typing import Any


# Trees and windows larger than this would only exhaust the memory.
LARGEST = 65536


def check_settings(
    decoding,
    least: dict[str, int] | None = None,
    choices: dict[str, tuple] | None = None,
    largest: int = LARGEST,
) -> None:
    """Check settings that are whole numbers of at least `least` and at most `largest`, or one of `choices`. None is
    right for a number whose default is None.

    Raises:
        ValueError: naming the setting.
    """
    for name, smallest in (least or {}).items():
        value = getattr(decoding, name)
        if value is None and decoding.__dataclass_fields__[name].default is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not smallest <= value <= largest:
            raise ValueError(f"{name} is {value!r}: give a whole number from {smallest} to {largest}")
    for name, values in (choices or {}).items():
        if getattr(decoding, name) not in values:
            raise ValueError(f"{name} is {getattr(decoding, name)!r}: choose among {', '.join(map(str, values))}")


def check_number(decoding, name: str, smallest: float, largest: float = 1e6) -> None:
    """Check a setting that is a finite number from `smallest` to `largest`.

    Raises:
        ValueError: naming the setting.
    """
    value = getattr(decoding, name)
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else None
    if number is None or not smallest <= number <= largest:
        raise ValueError(f"{name} is {value!r}: give a number from {smallest} to {largest:g}")


def check_several(decoding, name: str, kind: type, fits: Callable[[tuple], bool], sentence: str) -> None:
    """Check a setting of several numbers, of `kind` int or float, that `fits`. A list or one number becomes a tuple,
    since JSON has lists only.

    Raises:
        ValueError: naming the setting, with the `sentence`.
    """
    value = getattr(decoding, name)
    several = tuple(value) if isinstance(value, list | tuple) else (value,)
    kinds = (int, kind)
    if not all(isinstance(one, kinds) and not isinstance(one, bool) for one in several) or not fits(several):
        raise ValueError(f"{name} is {value!r}: {sentence}")
    object.__setattr__(decoding, name, tuple(map(kind, several)))
