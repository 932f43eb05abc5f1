"""How the bits of InfinityStar's passes (https://arxiv.org/abs/2511.04675) add up to latents."""

import torch
import torch.nn.functional as F


def bit_vectors(bits: torch.LongTensor) -> torch.Tensor:
    """The vectors [B, n, t, h, w] of the bits [B, t, h, w, n] of cells, float32 of length 1."""
    return ((2 * bits - 1) / bits.shape[-1] ** 0.5).movedim(-1, 1)


def enlarge(vectors: torch.Tensor, size: tuple[int, int, int]) -> torch.Tensor:
    """A map [B, n, t, h, w] at the `size` (channels, rows, columns) of latents. Channels are resized like rows and
    columns, time is not."""
    frames = vectors.transpose(1, 2).flatten(0, 1)[:, None]
    resized = F.interpolate(frames, size=size, mode="trilinear", align_corners=False)[:, 0]
    return resized.unflatten(0, (len(vectors), -1)).transpose(1, 2)


def reduce(latents: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Latents [B, C, t, H, W] at the places of the cells of a `grid` (rows, columns)."""
    return F.interpolate(latents, size=(latents.shape[2], *grid), mode="area")


def bits_of(latents: torch.Tensor, count: int, grid: tuple[int, int]) -> torch.LongTensor:
    """The `count` bits [B, t, h, w, n] of each cell of a `grid` that come nearest to latents [B, C, t, H, W]."""
    frames = latents.transpose(1, 2).flatten(0, 1)[:, None]
    resized = F.interpolate(frames, size=(count, *grid), mode="area")[:, 0]
    return (resized.unflatten(0, (len(latents), -1)) > 0).long().movedim(2, -1)
