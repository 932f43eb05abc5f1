"""Weights that are on another device until a component, or a layer, computes."""

import itertools

import torch
from diffusers import DiffusionPipeline
from diffusers.hooks.group_offloading import _GROUP_OFFLOADING

from ..models.saved_files import check_no_disk, check_without_disk


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks move the weights of a component. Offloading by groups may leave its hooks on any layer, where
    `hasattr` takes long to find none."""
    modules = [module]
    for part in modules:
        registry = vars(part).get("_diffusers_hook")
        if registry is not None and registry.get_hook(_GROUP_OFFLOADING) is not None:
            return True
        modules += filter(None, part._modules.values())
    return hasattr(module, "_hf_hook")


class OffloadMixin(DiffusionPipeline):
    """What offloading needs of a pipeline that calls parts of its components, besides their `forward`."""

    @property
    def has_hooks(self) -> bool:
        """Whether hooks move the weights of a component (offloading, several devices)."""
        return any(_has_hooks(part) for part in self.components.values() if isinstance(part, torch.nn.Module))

    @property
    def weight_devices(self) -> set[torch.device]:
        """Where the first weights of the components are."""
        parts = [part for part in self.components.values() if isinstance(part, torch.nn.Module)]
        return {weight.device for part in parts for weight in itertools.islice(part.parameters(), 1)}

    @property
    def _execution_device(self) -> torch.device:
        """Where calls compute: without hooks where the weights are, for which diffusers asks every module of every
        component, several times per call."""
        devices = self.weight_devices
        return super()._execution_device if len(devices) != 1 or self.has_hooks else devices.pop()

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
            ValueError: if `offload_type` is "block_level", or `offload_to_disk_path` is given.
        """
        check_no_disk(options)
        if offload_type != "leaf_level":
            raise ValueError(
                f"offload_type is {offload_type!r}, and some models call parts of a block on their own, whose weights "
                'would stay offloaded: give "leaf_level"'
            )
        devices = torch.device(onload_device), torch.device(offload_device)
        super().enable_group_offload(*devices, offload_type, **options)

    def check_offloading(self) -> None:
        """Refuse to compute with weights that diffusers offloads to disk.

        Raises:
            ValueError: if a component has some.
        """
        if not self.has_hooks:
            return
        for name, part in self.components.items():
            if isinstance(part, torch.nn.Module):
                check_without_disk(f"the {name}", part)

    def on_device(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move an offloaded component to the execution device, before its submodules are called directly, and return
        it."""
        if hasattr(module, "_hf_hook"):
            module._hf_hook.pre_forward(module)
        return module
