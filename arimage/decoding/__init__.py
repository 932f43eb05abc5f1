"""Decoding methods: small frozen objects that turn any `TokenModel` into codes. Knows no model; imports only torch."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from .autoregressive import AutoregressiveDecoding
from .interface import TokenModel
from .law import Sampling
from .speculative_jacobi import SpeculativeJacobiDecoding
from .state import DecodingState


__all__ = [
    "AutoregressiveDecoding",
    "Decoding",
    "DecodingState",
    "Sampling",
    "SpeculativeJacobiDecoding",
    "TokenModel",
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

    def start(self, model: TokenModel, sampling: Sampling, seeds: torch.LongTensor) -> DecodingState:
        """Prefill and decide what the prefill decides; `seeds` is int64 [B]."""

    def step(self, state: DecodingState) -> DecodingState:
        """One forward pass of the model."""


_METHODS = {method.__name__: method for method in (AutoregressiveDecoding, SpeculativeJacobiDecoding)}
_PRESETS = {
    "ar": (AutoregressiveDecoding, {}),
    "sjd": (SpeculativeJacobiDecoding, {"refresh": "independent"}),
    "sjd-coupled": (SpeculativeJacobiDecoding, {"refresh": "coupled"}),
    "sjd-gumbel": (SpeculativeJacobiDecoding, {"refresh": "gumbel"}),
}


def decoding_names() -> list[str]:
    """The names that `decoding_from_name` knows."""
    return list(_PRESETS)


def decoding_from_name(name: str, **settings) -> Decoding:
    """The decoding of a preset, "sjd-coupled" say, with `settings` changed.

    Raises:
        ValueError: if there is no such name or setting.
    """
    if name not in _PRESETS:
        raise ValueError(f"there is no decoding {name!r}: choose among {', '.join(_PRESETS)}")
    method, preset = _PRESETS[name]
    return _build(method, {**preset, **settings})


def decoding_to_dict(decoding: Decoding) -> dict:
    """The settings of a decoding as JSON-ready values; `decoding_from_dict` is the inverse."""
    return {"method": type(decoding).__name__, **dataclasses.asdict(decoding)}


def decoding_from_dict(settings: dict) -> Decoding:
    """The decoding that `decoding_to_dict` described.

    Raises:
        ValueError: if the method or a setting is unknown.
    """
    settings = dict(settings)
    method = settings.pop("method", None)
    if method not in _METHODS:
        raise ValueError(f"there is no decoding method {method!r}: choose among {', '.join(_METHODS)}")
    return _build(_METHODS[method], settings)


def _build(method: type, settings: dict) -> Decoding:
    names = [field.name for field in dataclasses.fields(method)]
    unknown = [name for name in settings if name not in names]
    if unknown:
        raise ValueError(f"{method.__name__} has no setting {unknown[0]!r}: it has {', '.join(names) or 'none'}")
    return method(**settings)


def decode(
    model: TokenModel,
    decoding: Decoding,
    sampling: Sampling,
    seeds: torch.LongTensor,
    on_step: Callable[[DecodingState], bool] | None = None,
) -> DecodingState:
    """Run `decoding` until every image is finished, or until `on_step`, called after every pass, returns True.

    `seeds` is int64 [B] on the model's device; an image depends on its own seed only, up to the rounding of differently shaped matrix products.
    """
    # On an accelerator, asking whether the images are finished waits for it.
    patience = 1 if model.device.type == "cpu" else 8
    state = decoding.start(model, sampling, seeds)
    while True:
        if on_step is not None and on_step(state):
            return state
        if state.forward_passes == model.num_tokens:
            return state
        if state.forward_passes % patience == 0 and bool(state.finished.all()):
            return state
        state = decoding.step(state)
