"""Classifier-free guidance computes every image twice: with its condition and without."""

import torch


def with_unconditional(condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The condition of B images, each value [B, ...], as that of 2 B rows: the images with their condition, then the same
    images with `unconditional` set, a bool [2 B]."""
    doubled = {name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in condition.items()}
    first = next(iter(condition.values()))
    doubled["unconditional"] = torch.arange(2 * len(first), device=first.device) >= len(first)
    return doubled
