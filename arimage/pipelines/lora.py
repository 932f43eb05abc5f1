"""LoRA adapters (https://arxiv.org/abs/2106.09685), loaded, scaled, fused and saved as in diffusers. peft is imported
only where an adapter is used."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE, LoraBaseMixin
from diffusers.utils import (
    delete_adapter_layers,
    is_peft_available,
    recurse_remove_peft_layers,
    set_adapter_layers,
    set_weights_and_activate_adapters,
)
from safetensors.torch import save_file
from torch import nn

from .lora_files import find_lora, module_of, read_lora, to_own_layers, without_prefix


# The key of the file's header for what adapters of this library add: `base`, a name, and `captions`, a list.
HEADER = "arimage"
# The module of peft's layers for weights that are not quantised.
PLAIN = "peft.tuners.lora.layer"
# What peft calls the parts of a layer with adapters.
LAYERS = ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")


class LoraMixin(LoraBaseMixin):
    """Adds adapters to a pipeline: `load_lora_weights`, `set_adapters`, `disable_lora`, `enable_lora`, `fuse_lora`,
    `unfuse_lora`, `delete_adapters`, `unload_lora_weights`, `enable_lora_hotswap`, `get_active_adapters`,
    `get_list_adapters` and `save_lora_weights`, as in diffusers.

    Pipelines that share a component, as those of `from_pipe` and `Pipeline(**pipe.components)`, share its adapters.
    """

    # The components that take adapters, which are also the prefixes of the keys in a file.
    _lora_loadable_modules = ["transformer"]
    components: dict[str, Any]
    known_captions: Any

    @classmethod
    def lora_state_dict(
        cls,
        pretrained_model_name_or_path_or_dict: str | os.PathLike | dict[str, torch.Tensor],
        *,
        weight_name: str | None = None,
        return_lora_metadata: bool = False,
        **hub,
    ) -> dict[str, torch.Tensor] | tuple[dict[str, torch.Tensor], dict]:
        """The weights of an adapter from a .safetensors file, a folder, a Hub repository or a dict, and with
        `return_lora_metadata` the header of its file. A file of peft, adapter_model.safetensors, is one for the
        component that generates the tokens. `hub` are arguments of `hf_hub_download`.

        Raises:
            ValueError: if the file does not exist or is damaged.
        """
        source = pretrained_model_name_or_path_or_dict
        if isinstance(source, dict):
            state, header = dict(source), {}
        else:
            state, header = read_lora(find_lora(source, weight_name, **hub), cls._lora_loadable_modules[0])
        return (state, header) if return_lora_metadata else state

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | os.PathLike | dict[str, torch.Tensor],
        adapter_name: str | None = None,
        hotswap: bool = False,
        **kwargs,
    ) -> None:
        """Load an adapter, which becomes the active one.

        Args:
            pretrained_model_name_or_path_or_dict, kwargs: see `lora_state_dict`.
            adapter_name: its name, by default "default_0", "default_1", ...; no part of the name of a parameter or of
                another adapter.
            hotswap: put the weights in place of those of the adapter of this name, which a compiled model does not
                notice. For adapters of other ranks call `enable_lora_hotswap(target_rank=...)` before the first one.

        Raises:
            ValueError: if peft is not installed, the name is taken or unsuitable, the file is damaged, or a key or
                a shape does not fit the components.
        """
        check_peft()
        source = pretrained_model_name_or_path_or_dict
        name = "the adapter" if isinstance(source, dict) else str(source)
        loaded: Any = self.lora_state_dict(source, return_lora_metadata=True, **kwargs)
        state, header = loaded
        components = {key: self._bare(key) for key in self._lora_loadable_modules}
        if adapter_name is None:
            used = {each for names in self.get_list_adapters().values() for each in names}
            adapter_name = next(text for i in range(len(used) + 1) if (text := f"default_{i}") not in used)
        found, settings = {}, header.get(LORA_ADAPTER_METADATA_KEY, {})
        for key, component in components.items():
            if component is not None and (part := without_prefix(state, key)):
                part = to_own_layers(part, without_prefix(settings, key), component)
                check_weights_fit(name, part, component)
                found[key] = part
        unknown = [key for key in state if key.partition(".")[0] not in components]
        if unknown or not found:
            prefixes, first = " or ".join(f"{key}." for key in components), ", ".join(unknown[:3]) or "none at all"
            raise ValueError(
                f"{name} has keys that do not begin with {prefixes}, such as {first}: "
                "give an adapter of this kind of pipeline, or load it into a component with "
                "load_lora_adapter(..., prefix=None)"
            )
        for key in found:
            check_adapter_name(adapter_name, components[key], hotswap)
        offloaded = self._optionally_disable_offloading(self)
        if offloaded[1] and any("lora_embedding" in each for each in state):
            self._offload_again(*offloaded)
            raise ValueError(
                "adapters of embeddings cannot be offloaded layer by layer: use enable_model_cpu_offload instead"
            )
        try:
            for key, part in found.items():
                _add(components[key], part, without_prefix(settings, key), adapter_name, hotswap)
        finally:
            self._offload_again(*offloaded)
        self._know_captions(adapter_name, header.get(HEADER, {}).get("captions", []))

    def _offload_again(self, model: bool, sequential: bool, group: bool) -> None:
        pipe: Any = self
        if model:
            pipe.enable_model_cpu_offload(device=pipe._offload_device)
        elif sequential:
            pipe.enable_sequential_cpu_offload(device=pipe._offload_device)
        elif group:
            from diffusers.hooks.group_offloading import _maybe_remove_and_reapply_group_offloading

            for part in self.components.values():
                if isinstance(part, nn.Module):
                    _maybe_remove_and_reapply_group_offloading(part)

    def get_list_adapters(self) -> dict[str, list[str]]:
        """The names of the loaded adapters, by component."""
        found = {key: list(getattr(self._bare(key), "peft_config", {})) for key in self._lora_loadable_modules}
        return {key: names for key, names in found.items() if names}

    def get_active_adapters(self) -> list[str]:
        """The names of the adapters that are in use."""
        layers = (layer for key in self._lora_loadable_modules for layer in lora_layers(self._bare(key)))
        return list(dict.fromkeys(name for layer in layers for name in layer.active_adapters))

    def set_adapters(
        self, adapter_names: list[str] | str, adapter_weights: float | dict | list[float] | list[dict] | None = None
    ) -> None:
        """Use these adapters and no others.

        Args:
            adapter_weights: a scale for all, or one per adapter, by default 1; a scale may be a dict of scales by
                component.

        Raises:
            ValueError: if an adapter is not loaded, or there are not as many scales as adapters.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        scales = list(adapter_weights) if isinstance(adapter_weights, list | tuple) else [adapter_weights] * len(names)
        if len(scales) != len(names):
            raise ValueError(f"there are {len(scales)} scales for {len(names)} adapters: give one per adapter")
        loaded = self.get_list_adapters()
        known = {name for each in loaded.values() for name in each}
        for name in names:
            if name not in known:
                raise ValueError(f"adapter {name!r} is not loaded: load it first, or name one of {', '.join(known)}")
        for key, there in loaded.items():
            chosen = {
                name: scale.get(key) if isinstance(scale, dict) else scale
                for name, scale in zip(names, scales, strict=True)
                if name in there
            }
            weights = [1.0 if scale is None else scale for scale in chosen.values()]
            set_weights_and_activate_adapters(self._bare(key), list(chosen), weights)

    def disable_lora(self) -> None:
        """Generate as without adapters, until `enable_lora`."""
        for key in self._lora_loadable_modules:
            set_adapter_layers(self._bare(key), enabled=False)

    def enable_lora(self) -> None:
        """Use the active adapters again."""
        for key in self._lora_loadable_modules:
            set_adapter_layers(self._bare(key), enabled=True)

    def fuse_lora(
        self,
        components: list[str] | None = None,
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: list[str] | None = None,
        **_,
    ) -> None:
        """Add the active adapters, or those of `adapter_names`, to the weights, by default of all components that have
        any. `fuse_lora` and then `unload_lora_weights` leave a model without adapters that can be saved.

        Args:
            lora_scale: a factor of the scales of the adapters.
            safe_fusing: whether to leave weights as they are that would not be finite.

        Raises:
            ValueError: if a component takes no adapters, or its weights are quantised, which would round the sum.
        """
        layers = self._layers_of(components)
        for layer in layers:
            # peft has other classes for packed weights.
            if type(layer).__module__ != PLAIN or not layer.get_base_layer().weight.is_floating_point():
                raise ValueError(
                    "the weights are quantised, and fusing would round the adapter: use it unfused, or load the model "
                    "without quantisation"
                )
        for layer in layers:
            if lora_scale != 1.0:
                layer.scale_layer(lora_scale)
            layer.merge(safe_merge=safe_fusing, adapter_names=adapter_names)
        self._note_fused()

    def unfuse_lora(self, components: list[str] | None = None, **_) -> None:
        """Subtract fused adapters from the weights again."""
        for layer in self._layers_of(components):
            layer.unmerge()
        self._note_fused()

    def delete_adapters(self, adapter_names: list[str] | str) -> None:
        """Delete adapters by their names."""
        for name in [adapter_names] if isinstance(adapter_names, str) else adapter_names:
            for key, there in self.get_list_adapters().items():
                if name in there:
                    delete_adapter_layers(self._bare(key), name)
                    getattr(self._bare(key), "peft_config", {}).pop(name, None)
            self._know_captions(name, [])

    def unload_lora_weights(self) -> None:
        """Delete all adapters and their layers. Weights that were fused stay as they are."""
        for key in self._lora_loadable_modules:
            component = self._bare(key)
            for name in self.get_list_adapters().get(key, ()):
                self._know_captions(name, [])
            if has_lora_layers(component):
                recurse_remove_peft_layers(component)
                component._hf_peft_config_loaded = False
                vars(component).pop("peft_config", None)
        self._note_fused()

    def _bare(self, key: str) -> Any:
        """A component without the wrapper of `torch.compile`."""
        component = self.components.get(key)
        return getattr(component, "_orig_mod", component)

    def _layers_of(self, components: list[str] | None) -> list[Any]:
        for key in components or ():
            if key not in self._lora_loadable_modules:
                raise ValueError(f"the {key} takes no adapters: name some of {', '.join(self._lora_loadable_modules)}")
        keys = self._lora_loadable_modules if components is None else components
        return [layer for key in keys for layer in lora_layers(self._bare(key))]

    def _note_fused(self) -> None:
        self._merged_adapters = {name for layer in self._layers_of(None) for name in layer.merged_adapters}

    def enable_lora_hotswap(self, target_rank: int = 128, check_compiled: str = "error") -> None:
        """Make room for adapters of up to `target_rank`, before the first one is loaded, so that they can be swapped
        without compiling again; see `load_lora_weights`.

        Raises:
            ValueError: if an adapter is loaded already.
        """
        if any(self.get_list_adapters().values()):
            raise ValueError("an adapter is loaded already: call enable_lora_hotswap before the first one")
        for key in self._lora_loadable_modules:
            self._bare(key)._prepare_lora_hotswap_kwargs = {
                "target_rank": target_rank,
                "check_compiled": check_compiled,
            }

    @classmethod
    def save_lora_weights(
        cls,
        save_directory: str | os.PathLike,
        *,
        weight_name: str = LORA_WEIGHT_NAME_SAFE,
        base: str | None = None,
        captions: Iterable[str] = (),
        **layers,
    ) -> None:
        """Write an adapter to one file of a folder.

        Args:
            layers: for each component NAME, `NAME_lora_layers`, its weights as `get_peft_model_state_dict` of peft
                returns them, and `NAME_lora_adapter_metadata`, `NAME.peft_config[adapter_name].to_dict()`.
            base: the name of the model that it was trained for.
            captions: what it was trained on; pipelines with `known_captions` know them while it is loaded.

        Raises:
            ValueError: if no component has weights, or an argument names no component.
        """
        state: dict[str, torch.Tensor] = {}
        settings: dict[str, Any] = {}
        for key in cls._lora_loadable_modules:
            weights = layers.pop(f"{key}_lora_layers", None) or {}
            state |= {f"{key}.{name}": value.contiguous() for name, value in weights.items()}
            config = layers.pop(f"{key}_lora_adapter_metadata", None) or {}
            settings |= {f"{key}.{name}": value for name, value in config.items() if _is_plain(value)}
        if layers or not state:
            allowed = ", ".join(f"{key}_lora_layers" for key in cls._lora_loadable_modules)
            raise ValueError(f"save_lora_weights got {', '.join(layers) or 'no weights'}: give {allowed}")
        about = {"base": base, "captions": list(captions)}
        header = {LORA_ADAPTER_METADATA_KEY: settings, HEADER: about}
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {name: json.dumps(value, default=sorted, sort_keys=True) for name, value in header.items()}
        save_file(state, folder / weight_name, metadata={"format": "pt", **texts})

    def check_without_adapters(self) -> None:
        """Refuse to save weights whose names are those of adapters' layers.

        Raises:
            ValueError: if an adapter is loaded.
        """
        for key in self._lora_loadable_modules:
            if has_lora_layers(self._bare(key)):
                raise ValueError(
                    f"the {key} has adapters, and no loader reads such a folder: call unload_lora_weights() first, "
                    "after fuse_lora() to keep what they change; save_lora_weights writes an adapter alone"
                )

    def _know_captions(self, adapter: str, captions: list[str]) -> None:
        """Make `captions` the ones that an adapter adds to `known_captions`, which is how a model says what it
        knows."""
        added = self.__dict__.setdefault("_lora_captions", {})
        before, known = added.pop(adapter, {}), self.known_captions
        if known is None:
            return
        pictures = {name: others for name, others in known.pictures.items() if others or name not in before}
        unlearned = known.unlearned | {name: its for name, its in before.items() if its}
        # With each caption, what the model had not learned of the picture of this name.
        added[adapter] = new = {
            text: unlearned.get(text, [])
            for text in captions
            if text not in pictures or text in unlearned.get(text, [])
        }
        self.known_captions = replace(
            known,
            pictures={**pictures, **{text: pictures.get(text, []) for text in new}},
            unlearned={name: [one for one in its if one not in new] for name, its in unlearned.items()},
        )


def check_peft() -> None:
    """Refuse adapters without peft.

    Raises:
        ValueError: if it is not installed.
    """
    if not is_peft_available():
        raise ValueError("adapters need peft: pip install 'arimage[lora]'")


def lora_layers(component: Any) -> Iterable[Any]:
    """The layers of a component that have adapters."""
    if isinstance(component, nn.Module) and is_peft_available():
        from peft.tuners.tuners_utils import BaseTunerLayer

        yield from (module for module in component.modules() if isinstance(module, BaseTunerLayer))


def has_lora_layers(component: Any) -> bool:
    """Whether a component has such layers, also ones whose adapters were all deleted."""
    return next(iter(lora_layers(component)), None) is not None


def adapter_state(components: Iterable[Any]) -> list:
    """What the adapters of components do, besides the values of their weights: captured steps hold it."""
    return [
        (
            tuple(layer.active_adapters),
            layer.disable_adapters,
            tuple(layer.merged_adapters),
            # A tensor that `hotswap` fills in place is the same one for captured steps.
            tuple(scale.data_ptr() if isinstance(scale, torch.Tensor) else scale for scale in layer.scaling.values()),
        )
        for component in components
        for layer in lora_layers(component)
    ]


def check_adapter_name(name: str, component: nn.Module, hotswap: bool) -> None:
    """Refuse a name by which peft would mistake other weights for those of the adapter when it swaps them.

    Raises:
        ValueError: if it is one, is taken, or is to be swapped and not there.
    """
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


def check_weights_fit(source: str, state: dict[str, torch.Tensor], component: nn.Module) -> None:
    """Refuse weights that are not those of an adapter of this component.

    Raises:
        ValueError: naming the first key that does not fit, and what was expected.
    """
    for key, value in state.items():
        match = re.fullmatch(r"(.+)\.lora_(?:embedding_)?(A|B|magnitude_vector)(?:\.weight|\.bias)?", key)
        module = None if match is None else module_of(component, match[1])
        if match is None or module is None or not hasattr(module, "weight"):
            raise ValueError(
                f"{source} has the key {key}, and this {type(component).__name__} has no such layer: give an adapter "
                "that was trained for it"
            )
        if value.ndim != 2 or match[2] not in "AB":
            continue
        rows, columns = module.weight.shape[:2]
        if isinstance(module, nn.Embedding):
            rows, columns = columns, rows
        axis, size = (1, columns) if match[2] == "A" else (0, rows)
        # Packed weights of quantised layers have other shapes.
        if module.weight.is_floating_point() and module.weight.ndim == 2 and value.shape[axis] != size:
            raise ValueError(
                f"{source} has {key} of the shape {list(value.shape)}, whose dimension {axis} must be {size} for this "
                f"{type(component).__name__}: give an adapter that was trained for it"
            )


def _add(component: nn.Module, state: dict, settings: dict, name: str, hotswap: bool) -> None:
    """Add an adapter to a component, or swap its weights."""
    from peft import inject_adapter_in_model, set_peft_model_state_dict
    from peft.utils.hotswap import (
        check_hotswap_configs_compatible,
        hotswap_adapter_from_state_dict,
        prepare_model_for_compiled_hotswap,
    )

    config = _config_of(state, settings)
    if hotswap:
        if any("lora_embedding" in key for key in state):
            raise ValueError("adapters of embeddings cannot be swapped: load this one under another name")
        # Weights of a higher rank trade places with those that they replace.
        state = {key: value.clone() for key, value in state.items()}
        check_hotswap_configs_compatible(component.peft_config[name], config)
        named = {re.sub(r"(lora_[AB])", rf"\1.{name}", key): value for key, value in state.items()}
        hotswap_adapter_from_state_dict(component, named, name, config)
        return
    inject_adapter_in_model(config, component, name, state_dict=state)
    set_peft_model_state_dict(component, state, name)
    # For the methods of diffusers' own mixin.
    component._hf_peft_config_loaded = True
    room = getattr(component, "_prepare_lora_hotswap_kwargs", None)
    if room is not None:
        prepare_model_for_compiled_hotswap(component, config=config, **room)
        component._prepare_lora_hotswap_kwargs = None
    # The dropout of new layers is that of training.
    component.train(component.training)
    component.requires_grad_(False)


def _config_of(state: dict[str, torch.Tensor], settings: dict) -> Any:
    """The LoraConfig of an adapter: that of its file, or what its weights say, with an alpha that equals the rank."""
    from peft import LoraConfig
    from peft.utils.other import get_pattern_key

    ranks = {key.partition(".lora_")[0]: len(value) for key, value in state.items() if re.search(r"lora_\w*A\b", key)}
    if settings:
        known = {name: value for name, value in settings.items() if name in LoraConfig.__dataclass_fields__}
        config = LoraConfig(**{**known, "target_modules": sorted(ranks), "inference_mode": True})
    else:
        rank = max(ranks.values(), key=list(ranks.values()).count)
        config = LoraConfig(
            r=rank,
            lora_alpha=rank,
            target_modules=sorted(ranks),
            use_dora=any("magnitude_vector" in key for key in state),
            lora_bias=any(key.endswith("lora_B.bias") for key in state),
            inference_mode=True,
        )
    # Layers of other ranks, such as those of fused projections, keep their scale.
    given, alphas = config.rank_pattern or {}, config.alpha_pattern or {}
    for name, rank in ranks.items():
        expected = given.get(get_pattern_key(list(given), name), config.r)
        if rank != expected:
            alpha = alphas.get(get_pattern_key(list(alphas), name), config.lora_alpha)
            ratio = rank / expected
            given[f"^{name}"] = rank
            alphas[f"^{name}"] = alpha * (ratio**0.5 if config.use_rslora else ratio)
    config.rank_pattern, config.alpha_pattern = given, alphas
    return config


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it, sets as lists."""
    return value is None or isinstance(value, str | int | float | list | dict | set)
