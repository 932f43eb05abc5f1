"""What the models of one call have in common, whatever their family."""

from collections.abc import Hashable, Sequence

import torch


def with_unconditional(condition: dict[str, torch.Tensor], kept: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The condition of B images, each value [B, ...], as that of 2 B rows: the images with their condition, then the same
    images with `unconditional` set, a bool [2 B], and nothing else of theirs but the values `kept`. Classifier-free guidance
    computes both."""
    doubled = {
        name: torch.cat([value, value if name in kept else torch.ones_like(value)])
        for name, value in condition.items()
    }
    first = next(iter(condition.values()))
    doubled["unconditional"] = torch.arange(2 * len(first), device=first.device) >= len(first)
    return doubled


def distinct(values: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """Where each of the different `values` is first, and which of these each value equals."""
    first: dict[Hashable, int] = {}
    for i, value in enumerate(values):
        first.setdefault(value, i)
    numbers = {value: number for number, value in enumerate(first)}
    return list(first.values()), [numbers[value] for value in values]


def distinct_rows(*tensors: torch.Tensor) -> tuple[list[int], list[int]]:
    """`distinct` of the rows of tensors [R, ...], bit by bit. Reads the device."""
    count = len(tensors[0])
    bits = [tensor.reshape(count, -1).contiguous().view(torch.uint8).cpu().numpy() for tensor in tensors]
    return distinct([b"".join(part[row].tobytes() for part in bits) for row in range(count)])


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
