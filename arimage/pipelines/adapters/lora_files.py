"""Files of adapters, and the keys that other programs give to their weights."""

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

from ...models.original_names import rename
from ...settings.schema import read_object
from ..saving.saved_folder import local_folder


# The key of the file's header for what adapters of this library add: `base`, a name, and `captions`, a list.
HEADER = "arimage"
# What `save_pretrained` of peft writes, and how its keys begin.
PEFT_WEIGHTS, PEFT_CONFIG, PEFT_PREFIX = "adapter_model.safetensors", "adapter_config.json", "base_model.model."
MAX_CONFIG_BYTES = 2**24
# What peft calls the parts of a layer with adapters.
LAYERS = ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
# Keys of other programs: how the names of layers begin, with dots and with underscores, how A and B end, and where
# peft itself has the name of the adapter.
_WHOLE, _FLAT = "diffusion_model.", ("lora_unet_", "lora_transformer_", "lycoris_")
_UP_OR_DOWN = re.compile(r"\.(?:lora_|lora\.|lora_linear_layer\.)(down|up)\.weight$")
_NAMED = re.compile(r"\.(?:lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)\.(?!weight$|bias$)([^.]+)(?=$|\.)")


def find_lora(source: str | os.PathLike, weight_name: str | None = None, **hub) -> Path:
    """The .safetensors file of an adapter: `source` itself, a file in that folder, or one of a Hub repository."""
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
    settings in the file next to them."""
    try:
        with safe_open(path, framework="pt") as file:
            state = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            texts = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a .safetensors file, or is damaged ({error}): get it again") from error
    # Other programs write other keys, whose values need not be JSON.
    header = {key: _parse(path, key, texts[key]) for key in (LORA_ADAPTER_METADATA_KEY, HEADER) if key in texts}
    if not state or not all(key.startswith(PEFT_PREFIX) for key in state):
        return state, header
    settings = path.with_name(PEFT_CONFIG)
    if settings.is_file() and settings.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{settings} cannot be read: it has more than {MAX_CONFIG_BYTES} bytes, get the file again")
    values = read_object(settings)
    if "peft_type" not in values:
        raise ValueError(f"{settings} has no peft_type, which says that it is of a LoRA: get the file again")
    config = {f"{component}.{name}": value for name, value in values.items()}
    state = {f"{component}.{key.removeprefix(PEFT_PREFIX)}": value for key, value in state.items()}
    return state, header | {LORA_ADAPTER_METADATA_KEY: config}


def _parse(path: Path, key: str, text: str) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {key} in its header is not JSON ({error}): save the adapter again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: {key} in its header is not a JSON object: save the adapter again")
    return value


def to_keys_of_peft(
    source: str, state: dict[str, torch.Tensor], components: dict[str, nn.Module]
) -> dict[str, torch.Tensor]:
    """The weights of an adapter by the keys of diffusers and peft, COMPONENT.LAYER.lora_A.weight, and those that other
    programs write: lora_down and lora_up, the name of the adapter after lora_A, and `diffusion_model.` or
    `lora_unet_` before the layer, if the pipeline has a single component that takes adapters. LAYER.alpha stays."""
    found: dict[str, torch.Tensor] = {}
    names = {match[1] for key in state if (match := _NAMED.search(key))}
    if len(names) > 1:
        raise ValueError(f"{source} has weights of the adapters {', '.join(sorted(names))}: save them one by one")
    layers = _flat_names(components) if any(key.startswith(_FLAT) for key in state) else {}
    for key, value in state.items():
        own = _UP_OR_DOWN.sub(lambda match: f".lora_{'A' if match[1] == 'down' else 'B'}.weight", key)
        own = _NAMED.sub(lambda match: match[0].removesuffix(f".{match[1]}"), own)
        own = _with_component(source, own, components, layers)
        if own in found:
            raise ValueError(f"{source} has {own} twice, under the names of two programs: give an adapter with one")
        found[own] = value
    return found


def _with_component(source: str, key: str, components: dict[str, nn.Module], layers: dict[str, set[str]]) -> str:
    """A key that begins with its component."""
    start = next((one for one in (_WHOLE, *_FLAT) if key.startswith(one)), None)
    if start is None:
        return key
    if len(components) != 1:
        raise ValueError(
            f"{source} has the key {key}, which may be of any of {', '.join(components)}: begin the keys with one"
        )
    [(name, component)] = components.items()
    layer, dot, part = key.removeprefix(start).partition(".")
    if start in _FLAT:
        chosen = layers.get(layer, set())
        if len(chosen) != 1:
            raise ValueError(
                f"{source} has the key {key}, and this {type(component).__name__} has {len(chosen)} layers of that "
                "name: give an adapter that was trained for it"
            )
        [layer] = chosen
    return f"{name}.{layer}{dot}{part}"


def _flat_names(components: dict[str, nn.Module]) -> dict[str, set[str]]:
    """The layers by their names, and by those of their authors, with underscores for the dots."""
    found: dict[str, set[str]] = {}
    for component in components.values():
        pairs = getattr(component, "original_names", ())
        for name, _ in component.named_modules():
            for text in (name, rename(f"{name}.", pairs).removesuffix(".")):
                found.setdefault(text.replace(".", "_"), set()).add(name)
    return found


def without_prefix(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """The values whose names begin with `prefix` and a dot, without these."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in values.items() if name.startswith(start)}


def module_of(component: nn.Module, name: str) -> nn.Module | None:
    """The layer with this name, without its adapters; None if there is none."""
    if not {*LAYERS}.isdisjoint(name.split(".")):
        return None
    try:
        module = component.get_submodule(name)
    except AttributeError:
        return None
    return getattr(module, "base_layer", module)
