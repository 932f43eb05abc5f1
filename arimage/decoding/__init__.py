"""Decoding methods: small frozen objects that turn any `TokenModel` or `ScaleModel` into codes. Knows no model; imports only
torch."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Protocol, get_args

import torch

from .acceptance import Acceptance, ExactAcceptance, GroupAcceptance, NeighbourAcceptance
from .autoregressive import AutoregressiveDecoding
from .collaborative import CollaborativeDecoding
from .draft_tree import DraftTreeDecoding
from .interface import ScaleModel, TokenModel
from .law import Sampling
from .lazy_jacobi import LazyJacobiDecoding
from .next_scale import NextScaleDecoding
from .parallel_jacobi import ParallelJacobiDecoding
from .speculative_jacobi import SpeculativeJacobiDecoding
from .state import DecodingState
from .tree_jacobi import TreeJacobiDecoding
from .zipar import ZipARDecoding


__all__ = [
    "PRESETS",
    "AutoregressiveDecoding",
    "CollaborativeDecoding",
    "Decoding",
    "DecodingState",
    "DraftTreeDecoding",
    "LazyJacobiDecoding",
    "ExactAcceptance",
    "GroupAcceptance",
    "NeighbourAcceptance",
    "NextScaleDecoding",
    "ParallelJacobiDecoding",
    "Sampling",
    "ScaleModel",
    "SpeculativeJacobiDecoding",
    "TokenModel",
    "TreeJacobiDecoding",
    "ZipARDecoding",
    "decode",
    "decoding_from_dict",
    "decoding_from_name",
    "decoding_names",
    "decoding_to_dict",
]


class Decoding(Protocol):
    """A decoding method: a frozen dataclass of its settings.

    Attributes:
        exact: whether its samples follow the model's own sampling law.
    """

    exact: bool

    def start(self, model: TokenModel | ScaleModel, sampling: Sampling, seeds: torch.LongTensor) -> DecodingState:
        """Prefill and decide what the prefill decides; `seeds` is int64 [B]."""

    def step(self, state: DecodingState) -> DecodingState:
        """One forward pass of the model."""


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
        NextScaleDecoding,
        CollaborativeDecoding,
    )
}
_FOR_SCALES = (NextScaleDecoding, CollaborativeDecoding)
_PARTS = {part.__name__: part for part in get_args(Acceptance)}


class Preset(NamedTuple):
    """A decoding with a name: its method, settings, what it does in a line, and the arXiv number of its paper."""

    method: type
    settings: dict
    summary: str
    paper: str = ""


PRESETS = {
    "ar": Preset(AutoregressiveDecoding, {}, "one code a pass, in raster order"),
    "sjd": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "independent"},
        "drafts a window, verifies it in one pass, draws the rest anew",
        "2410.01699",
    ),
    "sjd-coupled": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "coupled"},
        "as sjd, and what is drawn anew stays where it can (maximal coupling)",
        "2510.24211",
    ),
    "sjd-gumbel": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "gumbel"},
        "as sjd, and what is drawn anew keeps its Gumbel noise",
        "2510.24211",
    ),
    "sjd-tree": Preset(
        TreeJacobiDecoding, {}, "as sjd-coupled, with several drafts for the next code, each a branch", "2603.18599"
    ),
    "sjd-lazy": Preset(
        LazyJacobiDecoding, {}, "as sjd-coupled, with a far window that is evaluated only where something changed"
    ),
    "sjd++": Preset(
        SpeculativeJacobiDecoding,
        {"refresh": "independent", "reuse": 0.8},
        "as sjd, and drafts whose probability held stay undrawn",
        "2512.07503",
    ),
    "gsd": Preset(
        SpeculativeJacobiDecoding,
        {"acceptance": GroupAcceptance()},
        "as sjd-coupled, accepting by groups of similar codes",
        "2508.07747",
    ),
    "lantern": Preset(
        SpeculativeJacobiDecoding,
        {"acceptance": NeighbourAcceptance()},
        "as sjd-coupled, accepting by the nearest codes up to a probability",
        "2410.03355",
    ),
    "lantern++": Preset(
        SpeculativeJacobiDecoding,
        {"acceptance": NeighbourAcceptance(10, delta=1.0, relative=True)},
        "as lantern, up to a multiple of the draft's own probability",
        "2502.06352",
    ),
    "eagle": Preset(DraftTreeDecoding, {}, "a trained drafter proposes a tree of codes", "2406.16858"),
    "eagle-lantern": Preset(
        DraftTreeDecoding,
        {"acceptance": NeighbourAcceptance()},
        "as eagle, accepting by the nearest codes",
        "2410.03355",
    ),
    "zipar": Preset(ZipARDecoding, {}, "begins a row before the row above is complete", "2412.04062"),
    "pjd": Preset(ParallelJacobiDecoding, {}, "speculative Jacobi decoding in several rows at once", "2606.05703"),
    "next-scale": Preset(NextScaleDecoding, {}, "all codes of a map in one pass, from coarse to fine", "2404.02905"),
    "code": Preset(CollaborativeDecoding, {}, "as next-scale, the last maps by a smaller model", "2411.17787"),
}


def decoding_names(scales: bool | None = None) -> list[str]:
    """The names that `decoding_from_name` knows: all, or those for a `ScaleModel` (True) or a `TokenModel` (False)."""
    return [name for name, preset in PRESETS.items() if scales in (None, issubclass(preset.method, _FOR_SCALES))]


def decoding_from_name(name: str, **settings) -> Decoding:
    """The decoding of a preset, "sjd-coupled" say, with `settings` changed.

    Raises:
        ValueError: if there is no such name or setting.
    """
    if name not in PRESETS:
        raise ValueError(f"there is no decoding {name!r}: choose among {', '.join(PRESETS)}")
    preset = PRESETS[name]
    return _build(preset.method, {**preset.settings, **settings})


def decoding_to_dict(decoding: Decoding) -> dict:
    """The settings of a decoding as JSON-ready values; `decoding_from_dict` is the inverse.

    Raises:
        ValueError: if the decoding has a drafter of its own.
    """
    if getattr(decoding, "drafter", None) is not None:
        raise ValueError("a drafter is no setting: make it the pipeline's component `drafter` and leave it out here")
    settings = {field.name: getattr(decoding, field.name) for field in dataclasses.fields(decoding)}
    parts = {name: decoding_to_dict(part) for name, part in settings.items() if dataclasses.is_dataclass(part)}
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
        raise ValueError(f"there is no {kind} method {method!r}: choose among {', '.join(methods)}")
    return _build(methods[method], settings)


def _build(method: type, settings: dict):
    names = [field.name for field in dataclasses.fields(method)]
    unknown = [name for name in settings if name not in names]
    if unknown:
        raise ValueError(f"{method.__name__} has no setting {unknown[0]!r}: it has {', '.join(names) or 'none'}")
    parts = {name: _from_dict(name, part, _PARTS) for name, part in settings.items() if isinstance(part, dict)}
    return method(**{**settings, **parts})


def check_kind(model: TokenModel | ScaleModel, decoding: Decoding) -> None:
    """Refuse a decoding that is for the other kind of model."""
    scales = hasattr(model, "scales")
    if isinstance(decoding, _FOR_SCALES) != scales:
        names = ", ".join(decoding_names(scales))
        raise ValueError(f"{type(decoding).__name__} cannot decode this kind of model: choose among {names}")


def decode(
    model: TokenModel | ScaleModel,
    decoding: Decoding,
    sampling: Sampling,
    seeds: torch.LongTensor,
    on_step: Callable[[DecodingState], bool] | None = None,
) -> DecodingState:
    """Run `decoding` until every image is finished, or until `on_step`, called after every pass, returns True.

    `seeds` is int64 [B] on the model's device; an image depends on its own seed only, up to the rounding of differently
    shaped matrix products.

    Raises:
        ValueError: if `decoding` is for the other kind of model.
    """
    check_kind(model, decoding)
    # On an accelerator, asking whether the images are finished waits for it.
    patience = 1 if model.device.type == "cpu" else 8
    state = decoding.start(model, sampling, seeds)
    while True:
        if on_step is not None and on_step(state):
            return state
        if state.forward_passes == state.max_passes:
            return state
        if state.forward_passes % patience == 0 and bool(state.finished.all()):
            return state
        state = decoding.step(state)
