"""Weights that are on another device until a component, or a layer, computes."""

import torch
from diffusers import DiffusionPipeline
from diffusers.hooks.group_offloading import _is_group_offload_enabled


class OffloadMixin(DiffusionPipeline):
    """What offloading needs of a pipeline that calls parts of its components, besides their `forward`."""

    @property
    def has_hooks(self) -> bool:
        """Whether hooks move the weights of a component (offloading, several devices)."""
        modules = [part for part in self.components.values() if isinstance(part, torch.nn.Module)]
        return any(hasattr(module, "_hf_hook") or _is_group_offload_enabled(module) for module in modules)

    def enable_group_offload(
        self,
        onload_device: torch.device | str,
        offload_device: torch.device | str = "cpu",
        offload_type: str = "leaf_level",
        **options,
    ) -> None:
        """Keep weights on `offload_device`, and bring those of a layer to `onload_device` while it computes. `options`
        are those of `DiffusionPipeline.enable_group_offload`, such as `use_stream`.

        Raises:
            ValueError: if `offload_type` is "block_level".
        """
        if offload_type != "leaf_level":
            raise ValueError(
                f"offload_type is {offload_type!r}, and some models call parts of a block on their own, whose weights "
                'would stay offloaded: give "leaf_level"'
            )
        devices = torch.device(onload_device), torch.device(offload_device)
        super().enable_group_offload(*devices, offload_type, **options)

    def on_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move an offloaded component to the execution device, before its submodules are called directly, and return
        it."""
        if hasattr(module, "_hf_hook"):
            module._hf_hook.pre_forward(module)
        return module
