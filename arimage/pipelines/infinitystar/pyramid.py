"""How the bits of InfinityStar's passes (https://arxiv.org/abs/2511.04675) add up to latents."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from .schedules import Pass


def bit_vectors(bits: torch.LongTensor) -> torch.Tensor:
    """The vectors [B, n, t, h, w] of the bits [B, t, h, w, n] of cells, float32 of length 1."""
    return ((2 * bits - 1).float() / bits.shape[-1] ** 0.5).movedim(-1, 1)


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


def frames_of(one: Pass, latents: torch.Tensor) -> torch.Tensor:
    """The frames [B, C, t, H, W] that one pass covers, in the latents [B, C, T, H, W] of films."""
    return latents[:, :, one.first : one.first + one.shape[0]]


def add_bits(one: Pass, latents: torch.Tensor, bits: torch.LongTensor) -> None:
    """Add the bits [B, t, h, w, n] of one pass to the latents [B, C, T, H, W] of films, in place; nothing to those
    films of which some bits are -1, not known yet."""
    known = (bits >= 0).flatten(1).all(1).view(-1, 1, 1, 1, 1)
    size = latents.shape[1], *latents.shape[3:]
    frames_of(one, latents).add_(enlarge(bit_vectors(bits), size) * known)


def quantise(latents: torch.Tensor, film: Sequence[Pass]) -> list[torch.LongTensor]:
    """The bits [B, t, h, w, n] of each pass of a film, in order, that approach its latents [B, C, T, H, W]."""
    found, total = [], torch.zeros_like(latents)
    for one in film:
        left = frames_of(one, latents) - frames_of(one, total)
        found.append(bits_of(left, one.bits, one.shape[1:]))
        add_bits(one, total, found[-1])
    return found
