"""Decodings by name, and conversion to and from text and JSON."""

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .contract.supports import Decoding, Needs, Traits, missing
from .draft_tree import DraftTreeDecoding
from .exports import EXPORTS
from .names import PARTS, PRESETS, check_setting_names, parse_decoding, preset_settings


_METHODS = tuple(dict.fromkeys(preset.method for preset in PRESETS.values()))


def _class(name: str) -> Any:
    """The class of this name, imported when it is needed."""
    return getattr(import_module(f".{EXPORTS[name]}", __package__), name)


def decoding_names(traits: Traits | None = None) -> list[str]:
    """The names that `decoding_from_name` takes: all of them, or those that a model with these traits can run."""
    if traits is None:
        return list(PRESETS)
    return [name for name in PRESETS if missing(needs_of_preset(name), traits) is None]


def needs_of_preset(name: str) -> Needs:
    """The kinds of model that a preset can run on, each with what it needs from such a model."""
    preset: Any = decoding_from_name(name)
    return preset.needs


def decoding_from_name(name: str, **settings) -> Decoding:
    """The decoding of a preset such as "sjd-coupled", with `settings` in place of its own.

    Raises:
        ValueError: if the name or a setting is unknown.
    """
    changed = preset_settings(name, settings)
    return _build(_class(PRESETS[name].method), changed)


def decoding_to_dict(decoding: Decoding) -> dict:
    """The settings of a decoding as JSON-ready values; `decoding_from_dict` is the inverse.

    Raises:
        ValueError: if the decoding has a drafter of its own.
    """
    if isinstance(decoding, DraftTreeDecoding) and decoding.drafter is not None:
        raise ValueError("a drafter cannot be saved as a setting: register it as `pipe.drafter`")
    settings = {field.name: getattr(decoding, field.name) for field in dataclasses.fields(decoding)}
    parts = {
        name: {"method": type(part).__name__, **dataclasses.asdict(part)}
        for name, part in settings.items()
        if name in PARTS
    }
    return {"method": type(decoding).__name__, **settings, **parts}


def decoding_from_dict(settings: dict) -> Decoding:
    """The decoding that `decoding_to_dict` returned as a dictionary.

    Raises:
        ValueError: if the method or a setting is unknown.
    """
    return _from_dict("decoding", settings, _METHODS)


def _from_dict(kind: str, settings: dict, methods: Sequence[str]):
    settings = dict(settings)
    method = settings.pop("method", None)
    if method not in methods:
        raise ValueError(f"unknown {kind} method {method!r}; available: {', '.join(methods)}")
    return _build(_class(method), settings)


def _build(method: type, settings: dict):
    check_setting_names(method.__name__, settings)
    parts = {}
    for name, part in settings.items():
        if isinstance(part, dict):
            if name not in PARTS:
                raise ValueError(f"{name} is {part!r}, and has no settings of its own: give a value")
            parts[name] = _from_dict(name, part, PARTS[name])
    return method(**{**settings, **parts})


def decoding_from_text(text: str, own: Decoding | None = None) -> Decoding:
    """The decoding that "name:key=value,..." describes; see `parse_decoding`.

    Args:
        own: the decoding of a checkpoint. Its name stands for its settings instead of those of the preset, unless
            they make it lossy and the preset is exact.

    Raises:
        ValueError: if the name or a setting is unknown.
    """
    name, changes = parse_decoding(text)
    preset = PRESETS.get(name)
    if (
        own is None
        or preset is None
        or type(own) is not _class(preset.method)
        or own.exact != preset.exact
        or name != _nearest_preset(own)[0]
    ):
        return decoding_from_name(name, **changes)
    kept = {key: value for key, value in decoding_to_dict(own).items() if key != "method"}
    return _build(type(own), preset_settings(name, changes, kept))


def decoding_to_text(decoding: Decoding) -> str:
    """A decoding as text that `decoding_from_text` reads: the closest preset, and the settings that differ from it.

    Raises:
        ValueError: if the decoding has a drafter of its own, or its class is not one of arimage.
    """
    name, changes = _nearest_preset(decoding)
    settings = ",".join(f"{key}={_value_text(value)}" for key, value in changes.items())
    return f"{name}:{settings}" if settings else name


def _nearest_preset(decoding: Decoding) -> tuple[str, dict]:
    """The preset with the fewest settings that differ from those of `decoding`, and these settings."""
    own, method = _flat(decoding), type(decoding).__name__

    def changes(name: str) -> dict:
        preset = _flat(decoding_from_name(name))
        return {key: value for key, value in own.items() if key not in preset or preset[key] != value}

    names = [name for name, preset in PRESETS.items() if preset.method == method]
    if not names:
        raise ValueError(f"{method} has no text: give a decoding that is one of {', '.join(_METHODS)}")
    name = min(names, key=lambda name: (len(changes(name)), PRESETS[name].exact != decoding.exact))
    return name, changes(name)


def _flat(decoding: Decoding) -> dict:
    """The settings of a decoding, those of its parts one by one, by the names that they have in a text."""
    settings = {}
    for name, value in decoding_to_dict(decoding).items():
        if isinstance(value, dict):
            settings |= {name: value.pop("method"), **{f"{name}.{key}": part for key, part in value.items()}}
        elif name != "method":
            settings[name] = value
    return settings


def _value_text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return "+".join(map(str, value)) + ("+" if len(value) == 1 else "")
