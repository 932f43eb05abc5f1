"""LoRA adapters (https://arxiv.org/abs/2106.09685), loaded, scaled, fused and saved as in diffusers. peft is imported
only where an adapter is used."""

import json
import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from numbers import Real
from pathlib import Path
from typing import Any, cast

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

from ...models.saved_files import replace_files
from ...settings.schema import check
from ..quantized import check_full_weights
from ..text.known import KnownCaptions
from .lora_files import HEADER, find_lora, read_lora, to_keys_of_peft, without_prefix
from .lora_layers import (
    add_adapter,
    check_adapter_name,
    check_room,
    check_swap,
    check_untied,
    fuse,
    has_lora_layers,
    lora_layers,
    restored_on_error,
    swap_adapter,
    unfuse,
)
from .lora_settings import About, check_settings
from .lora_weights import Adapter, adapter_for


class LoraMixin(LoraBaseMixin):
    """Adds adapters to a pipeline: `load_lora_weights`, `set_adapters`, `disable_lora`, `enable_lora`, `fuse_lora`,
    `unfuse_lora`, `delete_adapters`, `unload_lora_weights`, `enable_lora_hotswap`, `get_active_adapters`,
    `get_list_adapters` and `save_lora_weights`, as in diffusers.

    Pipelines that share a component, as those of `from_pipe` and `Pipeline(**pipe.components)`, share its adapters.
    """

    # The components that take adapters, which are also the prefixes of the keys in a file.
    _lora_loadable_modules = ["transformer"]
    components: dict[str, Any]
    _own_captions: KnownCaptions | None = None
    _with_adapters: tuple[KnownCaptions, list[list[str]], KnownCaptions] | None = None

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
            hotswap: put the weights in place of those of the adapter of this name, whose scale becomes 1, which a
                compiled model does not notice. For adapters of other ranks call
                `enable_lora_hotswap(target_rank=...)` before the first one.

        Raises:
            ValueError: if peft is not installed, an adapter is fused, the name is taken or unsuitable, the file is
                damaged, a setting is wrong or not supported, weights are missing or not finite, or a key or a shape
                does not fit the components. Nothing has changed then.
        """
        check_peft()
        self._check_unfused("load_lora_weights")
        check_full_weights(self, "load_lora_weights")
        source = pretrained_model_name_or_path_or_dict
        name = "the adapter" if isinstance(source, dict) else str(source)
        state, header = cast(Any, self.lora_state_dict(source, return_lora_metadata=True, **kwargs))
        components = {key: self._bare(key) for key in self._lora_loadable_modules if self._bare(key) is not None}
        if adapter_name is None:
            used = {each for names in self.get_list_adapters().values() for each in names}
            adapter_name = next(text for i in range(len(used) + 1) if (text := f"default_{i}") not in used)
        adapters = self._adapters_of(name, state, header, components)
        for key, adapter in adapters.items():
            check_adapter_name(adapter_name, components[key], hotswap)
            check_room(components[key], adapter)
            if hotswap:
                check_swap(components[key], adapter, adapter_name)
        offloaded = self._optionally_disable_offloading(self)
        if offloaded[1] and any("lora_embedding" in key for each in adapters.values() for key in each.state):
            self._offload_again(*offloaded)
            raise ValueError(
                "adapters of embeddings cannot be offloaded layer by layer: use enable_model_cpu_offload instead"
            )
        try:
            with ExitStack() as stack:
                for key, adapter in adapters.items():
                    stack.enter_context(restored_on_error(components[key], adapter_name))
                    (swap_adapter if hotswap else add_adapter)(components[key], adapter, adapter_name)
        finally:
            self._offload_again(*offloaded)
        if not hotswap and any(layer.disable_adapters for layer in self._layers_of(None)):
            self.enable_lora()

    def _adapters_of(
        self, name: str, state: dict[str, torch.Tensor], header: dict, components: dict[str, nn.Module]
    ) -> dict[str, Adapter]:
        """The adapter of each component in a file. Changes nothing."""
        settings = header.get(LORA_ADAPTER_METADATA_KEY, {})
        about = check(About, header.get(HEADER, {}), f"{name}: {HEADER} in its header")
        state = to_keys_of_peft(name, state, components)
        unknown = [key for key in state if "." not in key or key.partition(".")[0] not in components]
        if unknown or not state:
            prefixes, first = " or ".join(f"{key}." for key in components), ", ".join(unknown[:3]) or "none at all"
            raise ValueError(
                f"{name} has keys that do not begin with {prefixes}, such as {first}: "
                "give an adapter of this kind of pipeline, or load it into a component with "
                "load_lora_adapter(..., prefix=None)"
            )
        for setting in settings:
            if setting.partition(".")[0] not in components:
                raise ValueError(
                    f"{name} has the setting {setting} in {LORA_ADAPTER_METADATA_KEY}, which does not begin with "
                    f"{' or '.join(components)}: save the adapter again"
                )
        found = {}
        for key, component in components.items():
            if part := without_prefix(state, key):
                own = check_settings(without_prefix(settings, key), name)
                found[key] = adapter_for(component, part, own, name)
                found[key].captions = about.captions
        return found

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
            ValueError: if an adapter is not loaded, a scale is not a finite number, there are not as many scales as
                adapters, or an adapter is fused.
        """
        self._check_unfused("set_adapters")
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        scales = list(adapter_weights) if isinstance(adapter_weights, list | tuple) else [adapter_weights] * len(names)
        if len(scales) != len(names):
            raise ValueError(f"there are {len(scales)} scales for {len(names)} adapters: give one per adapter")
        self._check_loaded(names)
        for scale in scales:
            self._check_scale(scale)
        for key, there in self.get_list_adapters().items():
            chosen = {
                name: scale.get(key) if isinstance(scale, dict) else scale
                for name, scale in zip(names, scales, strict=True)
                if name in there
            }
            weights = [1.0 if scale is None else scale for scale in chosen.values()]
            set_weights_and_activate_adapters(self._bare(key), list(chosen), weights)

    def _check_scale(self, scale: Any) -> None:
        """Refuse what is not the scale of an adapter: numbers, by component and perhaps by layer."""
        if isinstance(scale, dict) and not set(scale) <= set(self._lora_loadable_modules):
            raise ValueError(f"adapter_weights is {scale}: give scales by {', '.join(self._lora_loadable_modules)}")
        for one in scale.values() if isinstance(scale, dict) else [scale]:
            for number in one.values() if isinstance(one, dict) else [one]:
                if number is not None and not _is_finite(number):
                    raise ValueError(f"adapter_weights is {number!r}: give finite numbers")

    def disable_lora(self) -> None:
        """Generate as without adapters, until `enable_lora`.

        Raises:
            ValueError: if an adapter is fused.
        """
        self._check_unfused("disable_lora")
        for key in self._lora_loadable_modules:
            set_adapter_layers(self._bare(key), enabled=False)

    def enable_lora(self) -> None:
        """Use the active adapters again."""
        for key in self._lora_loadable_modules:
            set_adapter_layers(self._bare(key), enabled=True)

    @property
    def fused_loras(self) -> set[str]:
        """The names of the adapters that are fused, by this pipeline or another one that shares its components."""
        return {name for layer in self._layers_of(None) for name in layer.merged_adapters}

    @property
    def num_fused_loras(self) -> int:
        """The number of adapters that are fused."""
        return len(self.fused_loras)

    def fuse_lora(
        self,
        components: list[str] | None = None,
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: list[str] | str | None = None,
        **_,
    ) -> None:
        """Add the active adapters, or those of `adapter_names`, to the weights, by default of all components that have
        any. `fuse_lora` and then `unload_lora_weights` leave a model without adapters that can be saved.

        Until `unfuse_lora` or `unload_lora_weights`, a copy of the changed weights is kept in main memory, and what
        would change them is refused: loading, deleting, disabling or scaling adapters, and fusing again.

        Args:
            lora_scale: a factor of the scales of the adapters while they are fused.
            safe_fusing: whether to check that the sums are finite.
            adapter_names: every active adapter of these components, and perhaps others: one that is not fused would
                have no effect.

        Raises:
            ValueError: if a component takes no adapters, its weights are quantised, which would round the sum, or
                offloaded layer by layer, adapters are fused already or disabled, an active one is not among
                `adapter_names`, or with `safe_fusing` a sum is not finite. Nothing is fused then.
        """
        if not _is_finite(lora_scale):
            raise ValueError(f"lora_scale is {lora_scale!r}: give a finite number")
        layers = self._layers_of(components)
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        if fused := sorted({name for layer in layers for name in layer.merged_adapters}):
            raise ValueError(f"adapters are fused already ({', '.join(fused)}): call unfuse_lora() before fuse_lora")
        if any(layer.disable_adapters for layer in layers):
            raise ValueError("adapters are disabled: call enable_lora() before fuse_lora")
        if names is not None:
            self._check_loaded(names)
            ignored = {name for layer in layers for name in layer.active_adapters if name in layer.scaling} - {*names}
            if ignored:
                raise ValueError(
                    f"adapter_names is {', '.join(names)}, and {', '.join(sorted(ignored))}, which is active too, "
                    "would have no effect: name it, or call set_adapters first"
                )
        for key in self._lora_loadable_modules if components is None else components:
            if has_lora_layers(self._bare(key)):
                check_untied(self._bare(key))
        fuse(layers, names, lora_scale, safe_fusing)

    def unfuse_lora(self, components: list[str] | None = None, **_) -> None:
        """Bring back the weights from before `fuse_lora`, to the bit, and the scales of the adapters."""
        unfuse(self._layers_of(components))

    def _check_unfused(self, method: str) -> None:
        if fused := sorted(self.fused_loras):
            raise ValueError(
                f"adapters are fused ({', '.join(fused)}): before {method} call unfuse_lora(), or "
                "unload_lora_weights() to keep the weights as they are"
            )

    def _check_loaded(self, names: list[str]) -> None:
        known = {name for each in self.get_list_adapters().values() for name in each}
        for name in names:
            if name not in known:
                others = f", or name one of {', '.join(sorted(known))}" if known else ""
                raise ValueError(f"adapter {name!r} is not loaded: load it first{others}")

    def delete_adapters(self, adapter_names: list[str] | str) -> None:
        """Delete adapters by their names.

        Raises:
            ValueError: if an adapter is fused, or not loaded. Nothing is deleted then.
        """
        self._check_unfused("delete_adapters")
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        self._check_loaded(names)
        for name in names:
            for key, there in self.get_list_adapters().items():
                if name in there:
                    delete_adapter_layers(self._bare(key), name)
                    getattr(self._bare(key), "peft_config", {}).pop(name, None)

    def unload_lora_weights(self) -> None:
        """Delete all adapters and their layers. Weights that were fused stay as they are."""
        for key in self._lora_loadable_modules:
            component = self._bare(key)
            if has_lora_layers(component):
                recurse_remove_peft_layers(component)
                component._hf_peft_config_loaded = False
                vars(component).pop("peft_config", None)

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
            OSError: if the file cannot be written; the folder is then as it was.
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
        texts = {name: json.dumps(value, default=sorted, sort_keys=True) for name, value in header.items()}
        metadata = {"format": "pt", **texts}
        replace_files(Path(save_directory), lambda new: save_file(state, new / weight_name, metadata=metadata))

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

    @property
    def known_captions(self) -> KnownCaptions | None:
        """The captions that the model was trained on and those of the loaded adapters; None if it has no list. What is
        assigned are those of the model alone."""
        own = self._own_captions
        if own is None:
            return None
        configs: dict[str, Any] = {}
        for key in self._lora_loadable_modules:
            configs |= getattr(self._bare(key), "peft_config", {})
        added = [getattr(config, "captions", []) for config in configs.values()]
        if not any(added):
            return own
        # What is known keeps the tables of its own look-ups.
        if self._with_adapters is None or self._with_adapters[:2] != (own, added):
            known = own
            for captions in added:
                known = known.taught(captions)
            self._with_adapters = own, added, known
        return self._with_adapters[2]

    @known_captions.setter
    def known_captions(self, known: KnownCaptions | None) -> None:
        self._own_captions, self._with_adapters = known, None


def check_peft() -> None:
    """Refuse adapters without peft."""
    if not is_peft_available():
        raise ValueError("adapters need peft: pip install 'arimage[lora]'")


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold it, sets as lists."""
    return value is None or isinstance(value, str | int | float | list | dict | set)
