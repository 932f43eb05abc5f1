"""Weights of adapters whose layers are named or cut in another way than ours."""

import re

import torch
from torch import nn


_SPLIT = re.compile(r"(.+)\.([qkv])_proj\.lora_(A|B)\.weight")


def module_of(component: nn.Module, name: str) -> nn.Module | None:
    """The layer with this name, without its adapters; None if there is none."""
    modules = dict(component.named_modules())
    module = modules.get(name)
    return getattr(module, "base_layer", module)


def fuse_split_projections(state: dict[str, torch.Tensor], component: nn.Module) -> dict[str, torch.Tensor]:
    """Weights for a component whose `qkv_proj` is one layer, from those of an adapter for `q_proj`, `k_proj` and
    `v_proj`: A of rank r each becomes one of the rank 3 r, and B is block-diagonal.

    Raises:
        ValueError: if a layer has some of the three only.
    """
    parts: dict[str, dict[tuple[str, str], torch.Tensor]] = {}
    for key, value in state.items():
        match = _SPLIT.fullmatch(key)
        if match is not None and module_of(component, f"{match[1]}.qkv_proj") is not None:
            parts.setdefault(match[1], {})[match[2], match[3]] = value
    found = {key: value for key, value in state.items() if _stays(key, parts)}
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


def _stays(key: str, parts: dict) -> bool:
    match = _SPLIT.fullmatch(key)
    return match is None or match[1] not in parts
