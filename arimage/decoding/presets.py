"""Decodings by name, and as text, JSON and back."""

import dataclasses
from typing import NamedTuple, get_args

from .acceptance import Acceptance, GroupAcceptance, NeighbourAcceptance
from .autoregressive import AutoregressiveDecoding
from .collaborative import CollaborativeDecoding
from .draft_tree import DraftTreeDecoding
from .group import GroupDecoding
from .interface import Decoding
from .lazy_jacobi import LazyJacobiDecoding
from .next_scale import NextScaleDecoding
from .parallel_jacobi import ParallelJacobiDecoding
from .speculative_jacobi import SpeculativeJacobiDecoding
from .tree_jacobi import TreeJacobiDecoding
from .zipar import ZipARDecoding


_METHODS = {
    method.__name__: method
    for method in (
        AutoregressiveDecoding,
        SpeculativeJacobiDecoding,
        TreeJacobiDecoding,
        LazyJacobiDecoding,
        ZipARDecoding,
        ParallelJacobiDecoding,
        DraftTreeDecoding,
        GroupDecoding,
        NextScaleDecoding,
        CollaborativeDecoding,
    )
}
_FOR_SCALES = (NextScaleDecoding, CollaborativeDecoding)
_PARTS = {part.__name__: part for part in get_args(Acceptance)}


class Preset(NamedTuple):
    """A named decoding: its method, settings, a one-line summary, and the arXiv number of its paper."""

    method: type
    settings: dict
    summary: str
    paper: str = ""


PRESETS = {
    "ar": Preset(AutoregressiveDecoding, {}, "one token per forward pass"),
    "sjd": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "independent"},
        "drafts a window, verifies it in one forward pass, samples the rest again",
        "2410.01699",
    ),
    "sjd-coupled": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "coupled"},
        "like sjd, but drafts that are sampled again stay where they can (maximal coupling)",
        "2510.24211",
    ),
    "sjd-gumbel": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "gumbel"},
        "like sjd, but drafts that are sampled again keep their Gumbel noise",
        "2510.24211",
    ),
    "sjd-tree": Preset(
        TreeJacobiDecoding,
        {},
        "like sjd-coupled, with several drafts for the next token, each with a branch",
        "2603.18599",
    ),
    "sjd-lazy": Preset(
        LazyJacobiDecoding, {}, "like sjd-coupled, with a long window that is evaluated only where something changed"
    ),
    "sjd++": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "independent", "reuse": 0.8},
        "like sjd, but drafts whose probability held are kept",
        "2512.07503",
    ),
    "gsd": Preset(
        SpeculativeJacobiDecoding,
        {"acceptance": GroupAcceptance()},
        "like sjd-coupled, accepting by groups of similar tokens",
        "2508.07747",
    ),
    "lantern": Preset(
        SpeculativeJacobiDecoding,
        {"acceptance": NeighbourAcceptance()},
        "like sjd-coupled, accepting by the nearest tokens up to a probability",
        "2410.03355",
    ),
    "lantern++": Preset(
        SpeculativeJacobiDecoding,
        {"acceptance": NeighbourAcceptance(10, delta=1.0, relative=True)},
        "like lantern, up to a multiple of the draft's own probability",
        "2502.06352",
    ),
    "eagle": Preset(DraftTreeDecoding, {}, "a trained drafter proposes a tree of tokens", "2406.16858"),
    "eagle-lantern": Preset(
        DraftTreeDecoding,
        {"acceptance": NeighbourAcceptance()},
        "like eagle, accepting by the nearest tokens",
        "2410.03355",
    ),
    "zipar": Preset(ZipARDecoding, {}, "begins a row before the row above is complete", "2412.04062"),
    "pjd": Preset(ParallelJacobiDecoding, {}, "speculative Jacobi decoding in several rows at once", "2606.05703"),
    "groups": Preset(
        GroupDecoding, {}, "all tokens of a group in one forward pass, of a model for any order", "2503.10568"
    ),
    "next-scale": Preset(
        NextScaleDecoding, {}, "all tokens of a map in one forward pass, from coarse to fine", "2404.02905"
    ),
    "code": Preset(CollaborativeDecoding, {}, "like next-scale, the last maps by a smaller model", "2411.17787"),
}


def decoding_names(scales: bool | None = None, groups: bool = False) -> list[str]:
    """The names that `decoding_from_name` knows: all, or those for a `ScaleModel` (True) or a `TokenModel` (False), those for a
    `GroupModel` included if `groups`."""
    if scales is None:
        return list(PRESETS)
    return [
        name
        for name, preset in PRESETS.items()
        if scales == issubclass(preset.method, _FOR_SCALES) and (groups or preset.method is not GroupDecoding)
    ]


def decoding_from_name(name: str, **settings) -> Decoding:
    """The decoding of a preset such as "sjd-coupled", with `settings` changed.

    Raises:
        ValueError: if there is no such name or setting.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown decoding {name!r}; available: {', '.join(PRESETS)}")
    preset = PRESETS[name]
    return _build(preset.method, {**preset.settings, **settings})


def decoding_to_dict(decoding: Decoding) -> dict:
    """The settings of a decoding as JSON-ready values; `decoding_from_dict` is the inverse.

    Raises:
        ValueError: if the decoding has a drafter of its own.
    """
    if getattr(decoding, "drafter", None) is not None:
        raise ValueError("a drafter cannot be saved as a setting: register it as `pipe.drafter`")
    settings = {field.name: getattr(decoding, field.name) for field in dataclasses.fields(decoding)}
    parts = {
        name: {"method": type(part).__name__, **dataclasses.asdict(part)}
        for name, part in settings.items()
        if isinstance(part, Acceptance)
    }
    return {"method": type(decoding).__name__, **settings, **parts}


def decoding_from_dict(settings: dict) -> Decoding:
    """The decoding that `decoding_to_dict` described.

    Raises:
        ValueError: if the method or a setting is unknown.
    """
    return _from_dict("decoding", settings, _METHODS)


def _from_dict(kind: str, settings: dict, methods: dict[str, type]):
    settings = dict(settings)
    method = settings.pop("method", None)
    if method not in methods:
        raise ValueError(f"unknown {kind} method {method!r}; available: {', '.join(methods)}")
    return _build(methods[method], settings)


def _build(method: type, settings: dict):
    names = [field.name for field in dataclasses.fields(method)]
    unknown = [name for name in settings if name not in names]
    if unknown:
        raise ValueError(f"{method.__name__} has no setting {unknown[0]!r}: it has {', '.join(names) or 'none'}")
    parts = {name: _from_dict(name, part, _PARTS) for name, part in settings.items() if isinstance(part, dict)}
    return method(**{**settings, **parts})


def parse_decoding(text: str) -> tuple[str, dict]:
    """The name and the settings of "name:key=value,...", where a value is a whole number, a number, true, false, none or a word.

    Raises:
        ValueError: if a setting is not of that form.
    """
    name, _, rest = text.partition(":")
    settings = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{text!r} has the setting {item!r}: write it as key=value, as in sjd-coupled:window=16")
        settings[key.strip()] = _parse_value(value.strip())
    return name, settings


def _parse_value(text: str) -> bool | int | float | str | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def decoding_from_text(text: str) -> Decoding:
    """The decoding that "name:key=value,..." describes; see `parse_decoding`.

    Raises:
        ValueError: if the name or a setting is unknown.
    """
    name, settings = parse_decoding(text)
    return decoding_from_name(name, **settings)


def decoding_to_text(decoding: Decoding) -> str:
    """A decoding as `decoding_from_text` reads it: the closest preset and the settings that differ from it."""

    def changes(name: str) -> dict:
        preset = decoding_from_name(name)
        fields = [field.name for field in dataclasses.fields(decoding)]
        return {key: getattr(decoding, key) for key in fields if getattr(decoding, key) != getattr(preset, key)}

    names = [name for name, preset in PRESETS.items() if preset.method is type(decoding)]
    name = min(names, key=lambda name: len(changes(name)))
    settings = ",".join(
        f"{key}={'/'.join(map(str, value)) if isinstance(value, tuple) else value}"
        for key, value in changes(name).items()
    )
    return f"{name}:{settings}" if settings else name
