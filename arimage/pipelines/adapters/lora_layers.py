"""What peft does with the layers of a component: adapters are added, swapped, fused and taken away again."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.utils import is_peft_available
from torch import nn

from .lora_files import LAYERS
from .lora_weights import Adapter


# The module of peft's layers for weights that are not quantised.
PLAIN = "peft.tuners.lora.layer"


@dataclass(frozen=True)
class BeforeFusing:
    """What a layer was before adapters were fused, its weights in main memory: subtracting them again would leave
    rounding errors."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: dict[str, Any]


def named_lora_layers(component: Any) -> dict[str, Any]:
    """The layers of a component that have adapters, by name."""
    if not isinstance(component, nn.Module) or not is_peft_available():
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in component.named_modules() if isinstance(module, BaseTunerLayer)}


def lora_layers(component: Any) -> Iterable[Any]:
    """The layers of a component that have adapters."""
    return named_lora_layers(component).values()


def has_lora_layers(component: Any) -> bool:
    """Whether a component has such layers, also ones whose adapters were all deleted."""
    return len(named_lora_layers(component)) > 0


def check_adapter_name(name: str, component: nn.Module, hotswap: bool) -> None:
    """Refuse a name by which peft would mistake other weights for those of the adapter when it swaps them."""
    if not isinstance(name, str) or not name or "." in name:
        raise ValueError(f"adapter_name is {name!r}: give a name without a dot")
    loaded = getattr(component, "peft_config", {})
    if hotswap and name not in loaded:
        raise ValueError(
            f"adapter {name!r} is not loaded and cannot be swapped: load it first, or name one of {', '.join(loaded)}"
        )
    if not hotswap and name in loaded:
        raise ValueError(f"there is an adapter {name!r} already: choose another adapter_name, or hotswap=True")
    # Those of the adapter itself are checked when it is loaded.
    keys = () if hotswap else (*LAYERS, *component.state_dict())
    clash = next((key for key in keys if name in key), None)
    if clash is None:
        clash = next((other for other in loaded if other != name and (name in other or other in name)), None)
    if clash is not None:
        raise ValueError(f"adapter_name is {name!r}, which is part of the name {clash!r}: choose another")


def check_room(component: nn.Module, adapter: Adapter) -> None:
    """Refuse an adapter with a rank above that of `enable_lora_hotswap`."""
    room = getattr(component, "_prepare_lora_hotswap_kwargs", None)
    largest = max(adapter.ranks.values())
    if room is not None and largest > room["target_rank"]:
        raise ValueError(
            f"target_rank is {room['target_rank']}, and the adapter has the rank {largest}: call enable_lora_hotswap "
            "with more"
        )


def check_swap(component: nn.Module, adapter: Adapter, name: str) -> None:
    """Refuse an adapter that cannot take the place of another."""
    if any(part.startswith("lora_embedding") for parts in adapter.layers.values() for part in parts):
        raise ValueError("adapters of embeddings cannot be swapped: load this one under another name")
    there, old = _layers_with(component, name), component.peft_config[name]
    for layer in adapter.layers:
        if layer not in there:
            raise ValueError(f"adapter {name!r} does not change {layer}, and hotswap cannot add it: load both")
    new = adapter.config()
    for setting in ("use_rslora", "use_dora", "lora_bias"):
        if getattr(old, setting) != getattr(new, setting):
            raise ValueError(
                f"{setting} is {getattr(old, setting)} for adapter {name!r} and {getattr(new, setting)} for this one: "
                "load it under another name"
            )


def _layers_with(component: nn.Module, name: str) -> dict[str, Any]:
    return {path: layer for path, layer in named_lora_layers(component).items() if name in layer.scaling}


@contextmanager
def restored_on_error(component: nn.Module, name: str) -> Iterator[None]:
    """Leave a component as it was if adding or swapping the adapter `name` fails."""
    layers = {path: list(layer.active_adapters) for path, layer in named_lora_layers(component).items()}
    configs = dict(getattr(component, "peft_config", {}))
    flag, room = (
        getattr(component, each, None) for each in ("_hf_peft_config_loaded", "_prepare_lora_hotswap_kwargs")
    )
    old = _layers_with(component, name)
    settings = {path: (float(it.scaling[name]), it.r[name], it.lora_alpha[name]) for path, it in old.items()}
    weights = {path: [(each, each.data.clone()) for each in _weights(layer, name)] for path, layer in old.items()}
    try:
        yield
    except BaseException:
        for path, layer in named_lora_layers(component).items():
            if path not in layers:
                parent, _, child = path.rpartition(".")
                setattr(component.get_submodule(parent), child, layer.get_base_layer())
            elif path in old:
                scale, layer.r[name], layer.lora_alpha[name] = settings[path]
                _set_scale(layer, name, scale)
                for weight, value in weights[path]:
                    weight.data = value
            else:
                layer.delete_adapter(name)
                layer.set_adapter(layers[path])
        vars(component).pop("peft_config", None)
        if configs:
            component.peft_config = configs
        component._hf_peft_config_loaded = flag
        if room is not None:
            component._prepare_lora_hotswap_kwargs = room
        raise


def _weights(layer: Any, name: str) -> Iterator[nn.Parameter]:
    for part in layer.adapter_layer_names:
        own = getattr(layer, part)
        if name in own:
            yield from own[name].parameters() if isinstance(own[name], nn.Module) else [own[name]]


def add_adapter(component: nn.Module, adapter: Adapter, name: str) -> None:
    """Add an adapter to a component, as the active one."""
    from peft import inject_adapter_in_model, set_peft_model_state_dict
    from peft.utils.hotswap import prepare_model_for_compiled_hotswap

    inject_adapter_in_model(adapter.config(), component, name, state_dict=adapter.state)
    set_peft_model_state_dict(component, adapter.state, name)
    # For the methods of diffusers' own mixin.
    component._hf_peft_config_loaded = True
    room = getattr(component, "_prepare_lora_hotswap_kwargs", None)
    if room is not None:
        prepare_model_for_compiled_hotswap(component, **room)
        component._prepare_lora_hotswap_kwargs = None
    _settle(component, adapter, name)
    # The dropout of new layers is that of training.
    component.train(component.training)
    component.requires_grad_(False)


def swap_adapter(component: nn.Module, adapter: Adapter, name: str) -> None:
    """Put the weights of an adapter in place of those of the one with this name."""
    from peft.utils.hotswap import hotswap_adapter_from_state_dict

    # Weights of a higher rank trade places with those that they replace.
    state = {key: nn.Parameter(value.clone(), requires_grad=False) for key, value in adapter.state.items()}
    named = {re.sub(r"(lora_[AB])", rf"\1.{name}", key): value for key, value in state.items()}
    hotswap_adapter_from_state_dict(component, named, name, adapter.config())
    _settle(component, adapter, name)


def _settle(component: nn.Module, adapter: Adapter, name: str) -> None:
    """Give layers and settings the ranks that the weights have, which may be padded, and the scales of the adapter."""
    layers = _layers_with(component, name)
    ranks = {
        path: len(next(_weights(layer, name))) if name in layer.lora_A else layer.r[name]
        for path, layer in layers.items()
    }
    config = adapter.config(ranks)
    config.captions = adapter.captions
    for path, layer in layers.items():
        scale = adapter.scales.get(path, 1.0)
        layer.r[name], layer.lora_alpha[name] = ranks[path], scale * adapter.divisor(ranks[path])
        _set_scale(layer, name, scale)
    component.peft_config[name] = config


def _set_scale(layer: Any, name: str, scale: float) -> None:
    """Set the scale of an adapter; compiled steps hold the tensor that layers with room for swaps have."""
    if isinstance(layer.scaling[name], torch.Tensor):
        layer.scaling[name].fill_(scale)
    else:
        layer.scaling[name] = scale


# The share of an adapter that has to arrive in rounded weights.
LEAST_SHARE = 0.9


def check_untied(component: nn.Module) -> None:
    """Refuse to fuse adapters of layers whose weights are those of other layers too."""
    owners = Counter(id(weight) for module in component.modules() for weight in module.parameters(recurse=False))
    for name, layer in named_lora_layers(component).items():
        if owners[id(layer.get_base_layer().weight)] > 1:
            raise ValueError(f"{name} shares its weight, and fusing would change both layers: use the adapter unfused")


def fuse(layers: list[Any], names: list[str] | None, scale: float, safely: bool) -> None:
    """Add the active adapters, or those of `names`, to the weights; nothing changes if that fails. Warns if most of
    what they add is lost in the rounding of the weights."""
    chosen = []
    for layer in layers:
        base, own = layer.get_base_layer(), [it for it in names or layer.active_adapters if it in layer.scaling]
        # peft has other classes for packed weights, and weights stored in fp8 are cast in their forward pass.
        if type(layer).__module__ != PLAIN or not base.weight.is_floating_point() or base.weight.itemsize == 1:
            raise ValueError(
                "the weights are quantised, and fusing would round the adapter: use it unfused, or load the model "
                "without quantisation"
            )
        _check_here(base)
        if any(layer.lora_bias.get(name) for name in own) and base.bias is None:
            raise ValueError(
                "the adapter has lora_bias for a layer without a bias, and cannot be fused: use it unfused"
            )
        if own:
            chosen.append((layer, base, own))
    shares = []
    try:
        for layer, base, own in chosen:
            bias = None if getattr(base, "bias", None) is None else base.bias.detach().to("cpu", copy=True)
            layer._before_fusing = BeforeFusing(base.weight.detach().to("cpu", copy=True), bias, dict(layer.scaling))
            for name in own:
                layer.scaling[name] = layer.scaling[name] * scale
            shares.append(_merge(layer, base, own))
            if safely and not all(torch.isfinite(weight).all() for weight in base.parameters()):
                raise ValueError(
                    f"safe_fusing found a sum with {', '.join(own)} that is not finite: use another adapter"
                )
        arrived, wanted = (sum(part) for part in zip(*shares, strict=True)) if shares else (1.0, 1.0)
        if arrived < LEAST_SHARE * wanted:
            warnings.warn(
                f"fuse_lora: {arrived / wanted:.0%} of the adapter arrives, the rest is lost in the rounding of "
                f"{chosen[0][1].weight.dtype} weights: use it unfused, or load the model in float32",
                stacklevel=4,
            )
    except BaseException:
        unfuse([layer for layer, _, _ in chosen])
        raise


@torch.no_grad()
def _merge(layer: Any, base: nn.Module, names: list[str]) -> tuple[float, float]:
    """Merge adapters into a layer. Returns how far its weight moves in the direction in which they move it, and how
    far it would move without rounding, both times the length of that."""
    stored = base.weight.data
    before = stored.to(torch.promote_types(stored.dtype, torch.float32), copy=True)
    base.weight.data = before.clone()
    try:
        layer.merge(adapter_names=names)
        change = base.weight.data - before
        stored.copy_(base.weight.data)
    finally:
        # Where it is stored other layers may look for it.
        base.weight.data = stored
    return float(((stored - before) * change).sum()), float(change.square().sum())


def _check_here(base: nn.Module) -> None:
    if base.weight.is_meta:
        raise ValueError("the weights are offloaded layer by layer: fuse_lora and unfuse_lora before that")


@torch.no_grad()
def unfuse(layers: Iterable[Any]) -> None:
    """Bring back weights and scales of before `fuse`, to the bit."""
    layers = [layer for layer in layers if layer.merged or "_before_fusing" in vars(layer)]
    for layer in layers:
        _check_here(layer.get_base_layer())
    for layer in layers:
        before: BeforeFusing | None = vars(layer).pop("_before_fusing", None)
        if before is None:
            # Fused by the component itself.
            layer.unmerge()
            continue
        base = layer.get_base_layer()
        base.weight.copy_(before.weight)
        if before.bias is not None:
            base.bias.copy_(before.bias)
        layer.merged_adapters.clear()
        layer.scaling.update({name: scale for name, scale in before.scales.items() if name in layer.scaling})
