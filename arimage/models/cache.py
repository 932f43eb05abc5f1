"""The key/value caches of one call: allocated once, never rolled back."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from .binding import rows_of


class KeyValueCache(Protocol):
    """Keys and values of the images of one call.

    Images are the B images of the call. Rows are what attention sees: the images, under guidance followed by the same images
    without their condition. Slots name tokens as decodings do: 0 is the first image token, and -1 is nowhere.

    Attributes:
        length: how many keys the queries of the current forward pass attend to, which is the width of their mask.
    """

    length: int

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values [rows, heads, Q, head_dim] of a layer; return those that the queries attend to,
        [rows, heads, length, head_dim]."""
        ...

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        """Copy the slots `source` [B, M] to the slots `target` [B, M]; a target of -1 copies nowhere."""

    def reset_rows(self, images: torch.LongTensor) -> None:
        """Empty the rows of `images` [M], as they were when the cache was made."""

    def expand(self, images: torch.LongTensor) -> None:
        """Make image j of the cache a copy of what was image `images[j]`, [M]: a prompt of several images is prefilled once."""

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Let `images` [M] be those of `other`, a cache of M images with as many slots."""


class RowCache:
    """What the caches share.

    Attributes:
        keys, values: per layer, [rows, heads, size, head_dim].
        prefix: slots of the prompt, which come before those of the image.
        groups: rows per image.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    prefix: int
    groups: int

    def index(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Slots [B, Q] to indices [rows, Q] along the third dimension of the keys; that of nowhere is the last."""
        return torch.where(slots < 0, -1, slots + self.prefix).remainder(self.size).repeat(self.groups, 1)

    def rows(self, images: torch.LongTensor) -> torch.LongTensor:
        """The rows [groups * M] of `images` [M]."""
        return rows_of(images, self.groups, len(self.keys[0]) // self.groups)

    @property
    def size(self) -> int:
        return self.keys[0].shape[2]

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        source, target = self.index(source), self.index(target)
        for layer in (*self.keys, *self.values):
            place(layer, target.to(layer.device), taken(layer, source.to(layer.device)))

    def reset_rows(self, images: torch.LongTensor) -> None:
        for layer in (*self.keys, *self.values):
            layer.index_fill_(0, self.rows(images).to(layer.device), 0)

    def put(self, images: torch.LongTensor, other: Self) -> None:
        rows, first = self.rows(images), self.size - other.size
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine[:, :, first:].index_copy_(0, rows.to(mine.device), theirs)


def place(layer: torch.Tensor, index: torch.LongTensor, states: torch.Tensor) -> None:
    """Write `states` [rows, heads, Q, head_dim] at `index` [rows, Q] of a layer [rows, heads, size, head_dim]."""
    layer[torch.arange(len(index), device=index.device)[:, None], :, index] = states.transpose(1, 2)


def taken(layer: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """What lies at `index` [rows, Q] of a layer [rows, heads, size, head_dim]: [rows, heads, Q, head_dim]."""
    return layer[torch.arange(len(index), device=index.device)[:, None], :, index].transpose(1, 2)


class StackedCache(RowCache):
    """Layers of one shape on one device, in one tensor: keys and values [layers, rows, heads, size, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        size: int,
        prefix: int,
        groups: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.keys = torch.zeros(layers, rows, heads, size, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.prefix, self.groups = prefix, groups

    def expand(self, images: torch.LongTensor) -> None:
        rows = self.rows(images)
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


class SlotCache(StackedCache):
    """A `KeyValueCache` whose tokens are written at any slot; the last index takes what is thrown away.

    Args:
        prefix: prompt slots, before those of the image.
        slots: image and scratch slots, 0 .. slots - 1.
        groups: 1, or 2 when the rows are those of the images once with and once without the condition.
    """

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, *, prefix: int, slots: int, **settings):
        self.slots, self.length = slots, prefix + slots + 1
        super().__init__(layers, rows, heads, head_dim, size=self.length, prefix=prefix, **settings)

    def write_next_at(self, index: torch.LongTensor) -> None:
        """Let the next forward pass write at `index` [rows, Q]."""
        self._index = index

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place(self.keys[layer], self._index, keys)
        place(self.values[layer], self._index, values)
        return self.keys[layer], self.values[layer]


class GrowingCache(StackedCache):
    """A `KeyValueCache` that is filled from the front, one scale per forward pass, each behind those before.

    Args:
        prefix, slots: how many tokens the prompt and the image have.
        groups: as in `SlotCache`.

    Attributes:
        filled: how many tokens were in it before the current forward pass.
        modulations: what the condition gives to every forward pass; None before the first.
    """

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, *, prefix: int, slots: int, **settings):
        super().__init__(layers, rows, heads, head_dim, size=prefix + slots + 1, prefix=prefix, **settings)
        self.filled = self.length = 0
        self.modulations = None

    def write_next(self, count: int) -> None:
        """Let the next forward pass write `count` tokens behind those that are there."""
        self.filled, self.length = self.length, self.length + count

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer, :, :, self.filled : self.length] = keys
        self.values[layer, :, :, self.filled : self.length] = values
        return self.keys[layer, :, :, : self.length], self.values[layer, :, :, : self.length]

    def expand(self, images: torch.LongTensor) -> None:
        if self.modulations is not None:
            rows = self.rows(images)
            self.modulations = [tuple(part[rows] for part in layer) for layer in self.modulations]
        super().expand(images)
