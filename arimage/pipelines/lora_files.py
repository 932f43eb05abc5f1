"""Files of adapters, and weights whose layers are named or cut in another way than ours."""

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from torch import nn

from ..models.original_names import rename
from .saved_folder import local_folder


# What `save_pretrained` of peft writes, and how its keys begin.
PEFT_WEIGHTS, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
_SPLIT = re.compile(r"(.+)\.([qkv])_proj\.lora_(A|B)\.weight")


def find_lora(source: str | os.PathLike, weight_name: str | None = None, **hub) -> Path:
    """The .safetensors file of an adapter: `source` itself, a file in that folder, or one of a Hub repository.

    Raises:
        ValueError: if the file does not exist, or there are several without the usual name.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} is not a file: check the path of the adapter")
    folder = local_folder(source)
    if folder is None:
        if str(source).count("/") != 1:
            raise ValueError(f"{source} is neither a file, a folder nor a Hub repository (owner/name): check the path")
        if weight_name == PEFT_WEIGHTS:
            hf_hub_download(str(source), PEFT_CONFIG, **hub)
        return Path(hf_hub_download(str(source), weight_name or LORA_WEIGHT_NAME_SAFE, **hub))
    if weight_name is not None or (folder / LORA_WEIGHT_NAME_SAFE).is_file():
        path = folder / (weight_name or LORA_WEIGHT_NAME_SAFE)
        if not path.is_file():
            raise ValueError(f"{path} is not a file: check weight_name")
        return path
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise ValueError(f"{folder} has {len(files)} .safetensors files and no {LORA_WEIGHT_NAME_SAFE}: name the file")
    return files[0]


def read_lora(path: Path, component: str) -> tuple[dict[str, torch.Tensor], dict]:
    """The weights and the header of a file. Those of `save_pretrained` of peft become weights of `component`, with the
    settings in the file next to them.

    Raises:
        ValueError: if a file is damaged, or is of another method than LoRA.
    """
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            header = {name: json.loads(text) for name, text in (file.metadata() or {}).items() if name != "format"}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a .safetensors file, or is damaged ({error}): get it again") from error
    if not state or not all(key.startswith(PEFT_PREFIX) for key in state):
        return state, header
    settings = path.with_name(PEFT_CONFIG)
    try:
        config = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{settings} cannot be read ({error}): it has the scale of {path.name}") from error
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{settings} is of an adapter of the type {config.get('peft_type')}: give a LORA")
    state = {f"{component}.{key.removeprefix(PEFT_PREFIX)}": value for key, value in state.items()}
    return state, {LORA_ADAPTER_METADATA_KEY: {f"{component}.{name}": value for name, value in config.items()}}


def without_prefix(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The values whose names begin with `prefix` and a dot, without these."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def module_of(component: nn.Module, name: str) -> nn.Module | None:
    """The layer with this name, without its adapters; None if there is none."""
    try:
        module = component.get_submodule(name)
    except AttributeError:
        return None
    return getattr(module, "base_layer", module)


def to_own_layers(
    state: dict[str, torch.Tensor], settings: dict[str, Any], component: nn.Module
) -> dict[str, torch.Tensor]:
    """The weights of an adapter by the layers of `component`, from those by the names of its authors, or by split
    projections.

    Raises:
        ValueError: if a layer has only some of q, k and v, or layers with other names have settings of their own.
    """
    found = _fuse_split_projections(_by_our_names(state, component), component)
    if found.keys() != state.keys() and (settings.get("rank_pattern") or settings.get("alpha_pattern")):
        raise ValueError(
            "the adapter has rank_pattern or alpha_pattern for layers that have other names here: train it with one "
            "rank and one alpha"
        )
    return found


def _by_our_names(state: dict[str, torch.Tensor], component: nn.Module) -> dict[str, torch.Tensor]:
    pairs = getattr(component, "original_names", ())
    ours = {rename(f"{name}.", pairs): f"{name}." for name, _ in component.named_modules()}
    found = {}
    for key, value in state.items():
        layer, part, rest = key.partition("lora_")
        found[f"{ours.get(layer, layer)}{part}{rest}"] = value
    return found


def _fuse_split_projections(state: dict[str, torch.Tensor], component: nn.Module) -> dict[str, torch.Tensor]:
    """Weights for a component whose `qkv_proj` is one layer, from those of an adapter for `q_proj`, `k_proj` and
    `v_proj`: A of rank r each becomes one of the rank 3 r, and B is block-diagonal."""
    parts: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
    found = {}
    for key, value in state.items():
        match = _SPLIT.fullmatch(key)
        if match is not None and module_of(component, f"{match[1]}.qkv_proj") is not None:
            parts.setdefault(match[1], {})[match[2], match[3]] = value
        else:
            found[key] = value
    for name, values in parts.items():
        if len(values) != 6:
            raise ValueError(
                f"the adapter has {sorted(values)} of {name}, whose q_proj, k_proj and v_proj are one layer here: "
                "train it on all three"
            )
        for which in "AB":
            blocks = [values[part, which] for part in "qkv"]
            fused = torch.cat(blocks) if which == "A" else torch.block_diag(*blocks)
            found[f"{name}.qkv_proj.lora_{which}.weight"] = fused
    return found
