"""Which decoding can run on which model: what each decoding needs, and the message that names what a model lacks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch

from .distribution import Sampling
from .layout import Layout
from .models import Kind, Model
from .state import DecodingState


@dataclass(frozen=True)
class Traits:
    """The properties of a model that determine which decodings it can run.

    Attributes:
        kind: what the model generates.
        raster: whether its tokens are in raster order.
        one_grid: whether it generates one grid of tokens, with no other grids before it.
        block: how many tokens it predicts together.
        groups: whether it can predict a group of tokens in one forward pass, see `GroupModel`.
        frames: whether it generates frames.
        drafter, denoiser, neighbours, codebook, refiner: whether the model has one.
        noisy: whether every denoising step of its continuous tokens adds noise.
        prunes: whether it can leave out cells of a scale, see `ScaleModel`.
        teacher: the kind of the model that it was distilled from, None where there is none.
    """

    kind: Kind
    raster: bool = True
    one_grid: bool = True
    block: int = 1
    groups: bool = False
    frames: bool = False
    drafter: bool = False
    denoiser: bool = False
    neighbours: bool = False
    codebook: bool = False
    refiner: bool = False
    noisy: bool = True
    prunes: bool = False
    teacher: Kind | None = None


def traits_of(model: Model) -> Traits:
    """The traits of a model that is bound to the conditions of a call."""
    if model.kind == "tokens":
        return Traits(
            model.kind,
            raster=model.layout.order is None,
            one_grid=not model.layout.before,
            block=model.block,
            groups=model.predicts_groups,
            frames=len(model.layout.shape) == 3,
            drafter=model.drafter is not None,
            denoiser=model.denoises,
            neighbours=model.neighbours is not None,
            codebook=model.codebook is not None,
        )
    if model.kind == "scales":
        frames = len(model.scales[0]) == 3
        return Traits(model.kind, frames=frames, refiner=model.refiner is not None, prunes=model.prunes)
    if model.kind == "vectors":
        return Traits(model.kind, teacher=None if model.teacher is None else model.teacher.kind)
    if model.kind == "masked_tokens":
        return Traits(model.kind)
    noisy = model.kind != "causal_latents" or model.noisy
    return Traits(model.kind, noisy=noisy, drafter=model.drafter is not None)


Need = Literal[
    "raster", "one grid", "single tokens", "one order", "groups", "frames", "noise", "drafter", "denoiser",
    "neighbours", "codebook", "refiner", "pruning", "token teacher", "student",
]  # fmt: skip
Needs = Mapping[Kind, tuple[Need, ...]]
"""The kinds of model that a decoding can run on, each with what it needs from such a model."""

# Of each need: a trait, the value that it must have, and what is said of models that have another.
_LACKING: dict[Need, tuple[str, Any, str]] = {
    "raster": ("raster", True, "its tokens are not in raster order"),
    "one grid": ("one_grid", True, "it generates several grids of tokens: use ar, sjd-coupled or the like"),
    "single tokens": ("block", 1,
        "it predicts whole blocks of tokens: use ar, or sjd-coupled with a window that is a number"),
    "one order": ("groups", False,
        "it generates in any order, for which its cache keeps every token: use ar, sjd-coupled or the like"),
    "groups": ("groups", True, "it predicts one token after the other: use sjd-coupled or the like"),
    "frames": ("frames", True, 'init "previous" copies from the frame before, and it generates images'),
    "noise": ("noisy", True,
        "its last denoising step adds no noise, so that two paths never meet: use ar, or another sampler"),
    "drafter": ("drafter", True,
        "it has no drafter: give the pipeline one (`arimage train drafter` trains one for LlamaGen)"),
    "denoiser": ("denoiser", True,
        "it has no denoiser: train one with `arimage train denoiser`, or set levels to 0"),
    "neighbours": ("neighbours", True,
        "it has no model of neighbours: fit one with `arimage train neighbours`, or set corrections to 0"),
    "codebook": ("codebook", True, "it has no codebook, whose vectors this decoding compares"),
    "refiner": ("refiner", True, "it has no refiner: give the pipeline a second, smaller model"),
    "pruning": ("prunes", True, "it cannot leave out cells of a scale: use next-scale without pruned"),
    "token teacher": ("teacher", "tokens",
        "it needs the teacher of the student, one that generates token by token: give the pipeline one"),
    "student": ("teacher", "tokens", "it has no student: set guesses to random, or use sjd-coupled or the like"),
}  # fmt: skip
_REMEDIES: dict[Kind, str] = {
    "tokens": "it generates token by token: use ar, sjd-coupled or the like",
    "masked_tokens": "it generates tokens in any order, many in one forward pass: use halton or confidence",
    "scales": "it generates whole scales: use next-scale or code",
    "vectors": "it generates vectors from noise: use few-step",
    "masked_latents": "its tokens are continuous: use mar",
    "causal_latents": "its tokens are continuous: use ar, path-jacobi, or sjd-coupled with a window that is a number",
}


def missing(needs: Needs, traits: Traits) -> str | None:
    """What a model with these traits lacks, or None."""
    if traits.kind not in needs:
        return _REMEDIES[traits.kind]
    lacking = (_LACKING[need] for need in needs[traits.kind])
    return next((sentence for trait, value, sentence in lacking if getattr(traits, trait) != value), None)


class Decoding(Protocol):
    """A decoding method: a frozen dataclass of its settings. It may support some kinds of model only, and its `step`
    takes only states that its `start` returned.

    Attributes:
        exact: whether its samples follow the model's own distribution.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def exact(self) -> bool: ...

    def supports(self, model: Any) -> str | None:
        """None, or why this decoding cannot run on `model`, a `Model`."""
        ...

    def start(self, model: Any, sampling: Sampling, seeds: torch.LongTensor) -> DecodingState:
        """Prefill a model that is supported, and decide the first tokens from its logits. `seeds` is int64 [B]. All
        shapes are fixed here."""
        ...

    def step(self, state: Any) -> None:
        """Take one forward pass of the model. `state` is updated in place, and nothing is read on the host. Once all
        images are finished, a step changes nothing."""


class DecodingMethod:
    """Base class of the decodings of this package, which derives `supports` from `needs`. A setting that is out of its
    range is a `ValueError` that names it.

    Attributes:
        needs: the kinds of model that the decoding can run on, each with what it needs from such a model.
    """

    needs: ClassVar[Needs]

    def positions(self, layout: Layout) -> int | None:
        """The largest number of positions of an image that a step evaluates with these settings, those of a drafter
        included; None where a step evaluates what the model generates in one forward pass."""
        return None

    def misfit(self, model: Any) -> str | None:
        """Why the settings do not fit a model that meets all `needs`, or None."""
        return None

    def supports(self, model: Model) -> str | None:
        """None, or why this decoding cannot run on `model`."""
        return missing(self.needs, traits_of(model)) or self.misfit(model)
