"""The names of decodings and of their settings. Uses the standard library only, so that the command line can list and
check them without importing torch."""

import ast
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .exports import EXPORTS


# The names that `orders.order_of` takes.
Order = Literal["raster", "random", "farthest", "locality"]


class Preset(NamedTuple):
    """A named decoding: its method, the settings that differ from the method's defaults, whether it is exact, the
    arXiv number of its paper or "", and a one-line summary."""

    method: str
    settings: dict
    exact: bool
    paper: str
    summary: str


# fmt: off
PRESETS = {
    "ar": Preset("AutoregressiveDecoding", {}, True, "", "one token per forward pass"),
    "sjd": Preset("SpeculativeJacobiDecoding", {"refresh": "independent"}, True, "2410.01699",
        "guesses a window of tokens, verifies it in one forward pass, samples what was wrong again"),
    "sjd-coupled": Preset("SpeculativeJacobiDecoding", {"refresh": "coupled"}, True, "2510.24211",
        "guesses a window of tokens and verifies it in one forward pass; guesses change only as much as they must"),
    "sjd-gumbel": Preset("SpeculativeJacobiDecoding", {"refresh": "gumbel"}, True, "2510.24211",
        "like sjd, but each place keeps its random numbers when its token is sampled again"),
    "sjd2": Preset("SpeculativeJacobiDecoding", {"levels": 1}, True, "2510.08994",
        "like sjd-coupled, with drafts that a trained denoiser makes from noise"),
    "sjd-tree": Preset("TreeJacobiDecoding", {}, True, "2603.18599",
        "like sjd-coupled, with several drafts for the next token, each with a branch"),
    "sjd-lazy": Preset("LazyJacobiDecoding", {}, True, "",
        "like sjd-coupled, with a long window that is evaluated only where something changed"),
    "sjd++": Preset("SpeculativeJacobiDecoding", {"refresh": "independent", "reuse": 0.8}, False, "2512.07503",
        "like sjd, but drafts whose probability held are kept"),
    "gsd": Preset("SpeculativeJacobiDecoding", {"acceptance": {"method": "GroupAcceptance"}}, False, "2508.07747",
        "like sjd-coupled, accepting by groups of similar tokens"),
    "lantern": Preset("SpeculativeJacobiDecoding", {"acceptance": {"method": "NeighbourAcceptance"}}, False,
        "2410.03355", "like sjd-coupled, accepting by the nearest tokens up to a probability"),
    "lantern++": Preset("SpeculativeJacobiDecoding",
        {"acceptance": {"method": "NeighbourAcceptance", "neighbours": 10, "delta": 1.0, "relative": True}}, False,
        "2502.06352", "like lantern, up to a multiple of the draft's own probability"),
    "eagle": Preset("DraftTreeDecoding", {}, True, "2406.16858", "a trained drafter proposes a tree of tokens"),
    "eagle-lantern": Preset("DraftTreeDecoding", {"acceptance": {"method": "NeighbourAcceptance"}}, False,
        "2410.03355", "like eagle, accepting by the nearest tokens"),
    "zipar": Preset("ZipARDecoding", {}, False, "2412.04062", "begins a row before the row above is complete"),
    "pjd": Preset("ParallelJacobiDecoding", {}, False, "2606.05703",
        "speculative Jacobi decoding in several rows at once"),
    "line-cache": Preset("LineCacheDecoding", {}, False, "2512.04857",
        "one token per forward pass, with a cache of a few rows"),
    "groups": Preset("GroupDecoding", {}, False, "2503.10568",
        "all tokens of a group in one forward pass, of a model for any order"),
    "next-scale": Preset("NextScaleDecoding", {}, True, "2404.02905",
        "all tokens of a map in one forward pass, from coarse to fine"),
    "fastvar": Preset("NextScaleDecoding", {"pruned": (0.5,)}, False, "2503.23367",
        "like next-scale, but half of the cells of the last map are not fed"),
    "code": Preset("CollaborativeDecoding", {}, False, "2411.17787",
        "like next-scale, the last maps by a smaller model"),
    "few-step": Preset("FewStepDecoding", {}, False, "2412.17153",
        "a distilled model turns noise into all tokens in a few passes"),
    "path-jacobi": Preset("PathJacobiDecoding", {"coupling": "path"}, True, "",
        "like sjd-coupled of continuous tokens, but whole denoising paths are tested first"),
    "path-speculative": Preset("PathSpeculativeDecoding", {}, True, "",
        "a smaller model drafts continuous tokens with their denoising paths"),
    "flow": Preset("FlowDecoding", {}, True, "2412.17153",
        "a distilled model guesses all tokens, and its teacher verifies them"),
    "mar": Preset("MaskedDecoding", {}, True, "2406.11838",
        "sets of continuous tokens in a random order, each in one forward pass"),
    "mar-disa": Preset("MaskedDecoding", {"diffusion_steps": (50, 5)}, False, "2505.20297",
        "like mar, with fewer and fewer denoising steps"),
    "recap": Preset("ReCAP", {}, False, "2505.19089",
        "like mar or halton, but every other forward pass of the second half evaluates few tokens"),
    "lazy-mar": Preset("LazyMAR", {}, False, "2503.12450",
        "like mar, but most forward passes evaluate only what changed, without guidance's second branch"),
    "halton": Preset("HaltonDecoding", {}, True, "2503.17076",
        "sets of tokens that are far from each other, each set in one forward pass"),
    "confidence": Preset("ConfidenceDecoding", {}, True, "2202.04200",
        "in each forward pass those tokens that the model is most certain of"),
    "ml-cache": Preset("MLCache", {}, False, "2510.06308",
        "like confidence, but most forward passes evaluate only the rows that the model is least certain of"),
    "cspd": Preset("ContinuousSpeculativeDecoding", {}, False, "2411.11925",
        "like mar, a smaller model drafts several sets per forward pass, which does not see them"),
}
# fmt: on
ACCEPTANCES = ("ExactAcceptance", "GroupAcceptance", "NeighbourAcceptance")
# Settings that have settings of their own, and what each may be.
PARTS = {"acceptance": ACCEPTANCES, "sampler": ("HaltonDecoding", "ConfidenceDecoding")}


def nearest_names(name: str, names: Iterable[str] = PRESETS) -> list[str]:
    """The names of decodings that are similar to a wrong one."""
    return get_close_matches(name, list(names), n=4, cutoff=0.5)


def check_name(name: str) -> None:
    """Raise a `ValueError` if no decoding has this name."""
    if name not in PRESETS:
        nearest = nearest_names(name)
        remedy = f"the nearest are {', '.join(nearest)}, and " if nearest else ""
        raise ValueError(f"unknown decoding {name[:80]!r}: {remedy}`arimage decodings` lists all")


@cache
def defaults_of(method: str) -> dict[str, Any]:
    """The settings of a method or a part with their defaults, read from the source of its dataclass; a default that
    is a part is a dictionary with its "method"."""
    source = Path(__file__).parent.joinpath(*EXPORTS[method].split(".")).with_suffix(".py")
    classes = [node for node in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    (found,) = (node for node in classes if node.name == method)
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    return {
        ast.unparse(field.target): _default(field.value)
        for field in fields
        if field.value is not None and not ast.unparse(field.annotation).startswith("ClassVar")
    }


def _default(value: ast.expr) -> Any:
    if not isinstance(value, ast.Call):
        return ast.literal_eval(value)
    arguments = {argument.arg: argument.value for argument in value.keywords}
    if "default" in arguments:
        return ast.literal_eval(arguments["default"])
    return {"method": ast.unparse(arguments["default_factory"])}


def check_setting_names(method: str, settings: dict) -> None:
    """Raise a `ValueError` if a method or a part does not have one of these settings."""
    defaults = defaults_of(method)
    unknown = [name for name in settings if name not in defaults]
    if unknown:
        known = ", ".join(defaults) or "none"
        raise ValueError(f"{method} has no setting {unknown[0]!r}: it has {known}")


def parse_decoding(text: str) -> tuple[str, dict]:
    """Parse "name:key=value,..." into the name and the settings. A value is an integer, a number, true, false, none or
    a word, or several of these joined by plus signs ("4+" is a tuple of one). "lantern:acceptance.delta=0.2" changes a
    setting of the acceptance, "sjd:acceptance=GroupAcceptance,acceptance.size=4" takes another acceptance.

    Raises:
        ValueError: if a setting is not of that form.
    """
    name, _, rest = text.partition(":")
    settings = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{text!r} has the setting {item!r}: write it as key=value, as in sjd-coupled:window=16")
        key, parsed = key.strip(), _parse_value(value.strip())
        setting, _, part = key.partition(".")
        target, name_there = settings, key
        if setting in PARTS:
            target, name_there = settings.setdefault(setting, {}), part or "method"
        if name_there in target:
            raise ValueError(f"{text!r} has the setting {key!r} twice: give it once")
        target[name_there] = parsed
    return name, settings


def _parse_value(text: str) -> bool | int | float | str | tuple | None:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return tuple(map(_parse_value, filter(None, text.split("+")))) if "+" in text else text


def preset_settings(name: str, changes: dict, own: dict | None = None) -> dict:
    """The settings of a preset, or `own` ones in their place, with `changes`; a part without a method changes that of
    the preset.

    Raises:
        ValueError: if the name or a setting is unknown.
    """
    check_name(name)
    preset = PRESETS[name]
    check_setting_names(preset.method, changes)
    base = preset.settings if own is None else own
    settings = {**base, **changes}
    for key, methods in PARTS.items():
        part = settings.get(key)
        if not isinstance(part, dict):
            continue
        part = part if "method" in part else {**defaults_of(preset.method)[key], **base.get(key, {}), **part}
        method = part["method"]
        if method not in methods:
            raise ValueError(f"unknown {key} method {method!r}; available: {', '.join(methods)}")
        check_setting_names(method, {name: value for name, value in part.items() if name != "method"})
        settings[key] = part
    return settings


def check_text(text: str) -> None:
    """Raise a `ValueError` if "name:key=value,..." has an unknown name or setting."""
    name, settings = parse_decoding(text)
    preset_settings(name, settings)
