"""Rotary position embeddings."""

from collections.abc import Sequence

import torch


def frequencies_of(width: int, theta: float, device: torch.device) -> torch.Tensor:
    """By how much each of the pairs of `width` channels turns per position, float32 [width / 2]."""
    return theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)


def turns(angles: torch.Tensor) -> torch.Tensor:
    """The cosines and sines [..., F, 2] of angles [..., F], for `rotate`."""
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def turns_at(positions: torch.Tensor, head_dim: int, theta: float) -> torch.Tensor:
    """The `turns` of positions [..., A], float32 [..., head_dim / 2, 2]: each of the A coordinates turns an equal part
    of the channels."""
    frequencies = frequencies_of(head_dim // positions.shape[-1], theta, positions.device)
    return turns((positions[..., None] * frequencies).flatten(-2))


def grid_angles(positions: Sequence[torch.Tensor], frequencies: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The angles [*shape, F] of every place of a grid, one tensor per axis, whose places have `positions` [n] and turn
    by `frequencies` [F]."""
    shape, tables = [len(places) for places in positions], []
    for axis, (places, frequency) in enumerate(zip(positions, frequencies, strict=True)):
        view = [1] * len(shape) + [-1]
        view[axis] = len(places)
        tables.append(torch.outer(places, frequency).view(view).expand(*shape, -1))
    return tables


def grid_turns(positions: Sequence[torch.Tensor], frequencies: Sequence[torch.Tensor]) -> torch.Tensor:
    """The `turns` of `grid_angles`: [places, all F, 2], the first axis first."""
    return turns(torch.cat(grid_angles(positions, frequencies), dim=-1).flatten(0, -2))
