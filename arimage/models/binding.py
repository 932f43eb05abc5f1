"""What the models of one call have in common, whatever their family."""

import torch


def with_unconditional(condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The condition of B images, each value [B, ...], as that of 2 B rows: the images with their condition, then the same
    images with `unconditional` set, a bool [2 B]. Classifier-free guidance computes both."""
    doubled = {name: value.repeat(2, *[1] * (value.ndim - 1)) for name, value in condition.items()}
    first = next(iter(condition.values()))
    doubled["unconditional"] = torch.arange(2 * len(first), device=first.device) >= len(first)
    return doubled


def repeat_images(rows: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """Rows [groups * P, ...] of P prompts as rows [groups * P * count, ...] of `count` images for each prompt."""
    return rows.unflatten(0, (groups, -1)).repeat_interleave(count, dim=1).flatten(0, 1)


def rows_of(images: torch.LongTensor, groups: int, count: int) -> torch.LongTensor:
    """The rows [groups * M] of `images` [M] among those of `count` images."""
    return torch.cat([images + group * count for group in range(groups)])


def check_raster(layout, family: str) -> None:
    """Refuse a `Layout` that is not an image in raster order.

    Raises:
        ValueError: if the layout has three dimensions, or an order.
    """
    if len(layout.shape) != 2:
        raise ValueError(f"layout has shape {layout.shape}: {family} generates images, give (rows, columns)")
    if layout.order is not None:
        raise ValueError(f"layout has an order: {family} generates in raster order only, give none")
