"""The key/value caches of one call: allocated once, never rolled back."""

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from .conditions import rows_of


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
        """Make image j of the cache a copy of what was image `images[j]`, [M]."""
        ...

    def take_rows(self, rows: torch.LongTensor) -> None:
        """Make row j of the cache a copy of what was row `rows[j]`, [R]: equal prompts are prefilled once."""


class RowCache:
    """What the caches share.

    Attributes:
        keys, values: per layer, [rows, heads, size, head_dim].
        prefix: where the prompt ends, behind which lie all slots.
        groups: rows per image.
        places: int64 [slots + 1], where each slot lies along the third dimension of the keys; the last is nowhere.
    """

    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    prefix: int
    groups: int
    places: torch.LongTensor

    def index(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Slots [B, Q], -1 = nowhere, to indices [rows, Q] along the third dimension of the keys."""
        return self.places[slots].repeat(self.groups, 1)

    def rows(self, images: torch.LongTensor) -> torch.LongTensor:
        """The rows [groups * M] of `images` [M]."""
        return rows_of(images, self.groups, len(self.keys[0]) // self.groups)

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        source, target = self.index(source), self.index(target)
        for layer in (*self.keys, *self.values):
            place(layer, target.to(layer.device), taken(layer, source.to(layer.device)))

    def reset_rows(self, images: torch.LongTensor) -> None:
        for layer in (*self.keys, *self.values):
            layer.index_fill_(0, self.rows(images).to(layer.device), 0)


def place(layer: torch.Tensor, index: torch.LongTensor, states: torch.Tensor) -> None:
    """Write `states` [rows, heads, Q, head_dim] at `index` [rows, Q] of a layer [rows, heads, size, head_dim]."""
    layer[torch.arange(len(index), device=index.device)[:, None], :, index] = states.transpose(1, 2)


def taken(layer: torch.Tensor, index: torch.LongTensor) -> torch.Tensor:
    """What lies at `index` [rows, Q] of a layer [rows, heads, size, head_dim]: [rows, heads, Q, head_dim]."""
    return layer[torch.arange(len(index), device=index.device)[:, None], :, index].transpose(1, 2)


class PlacedCache(RowCache):
    """A cache whose tokens are written at any slot. The prompt, whose length is rounded up, is followed by the row ends, the scratch
    slots, one place that takes what is thrown away, and the image, of which the queries attend to the first slots only.

    Attributes:
        prompt: how many tokens the prompts have.
        prefix: where prompts end; they are padded on the left.
        slots, scratch: how many slots the image and the trees have, 0 .. slots + scratch - 1.
        owners: int64 [E], the slot that each row end belongs to.
        first: the place of the image's first slot.
        limit: to how many of the image slots forward passes attend, all by default. What they feed must lie below.
        length: to how many keys the current forward pass attends.
    """

    def lay_out(self, prompt: int, slots: int, scratch: int, owners: torch.LongTensor) -> None:
        self.prompt, self.slots, self.scratch, self.owners = prompt, slots, scratch, owners
        behind = len(owners) + scratch + 1
        # Attention on a GPU copies a mask, in every layer, whose rows do not begin at multiples of 16.
        self.first = -(-(prompt + behind) // 16) * 16
        self.prefix, self.size, self.limit = self.first - behind, self.first + slots, slots
        places = torch.arange(self.prefix + len(owners), self.size, device=owners.device)
        self.places = places.roll(-scratch - 1)
        # The slot at each place behind the prompt. Nowhere, the last, is that of padding, which sees what it is thrown into.
        self._slots = torch.cat([owners, torch.arange(len(places), device=owners.device).roll(scratch + 1)])

    def write_next_at(self, index: torch.LongTensor, length: int | None = None) -> None:
        """Let the next forward pass write at `index` [rows, Q], and attend to the first `length` keys, by default to all up to the
        limit."""
        self._rows, self._index = torch.arange(len(index), device=index.device)[:, None], index
        self.length = self.first + self.limit if length is None else length

    def slots_of(self, positions: torch.LongTensor, slots: torch.LongTensor | None) -> torch.LongTensor:
        """The slots [B, Q] of queries, where padding has the last, nowhere; see `TokenModel.forward`."""
        own = positions if slots is None else torch.where(positions < 0, -1, slots)
        return own.remainder(len(self.places))

    def seen(self, slots: torch.LongTensor, visible: torch.BoolTensor | None) -> torch.BoolTensor:
        """Which keys up to the limit, behind the prompt, the queries at `slots` [B, Q] see: [B, Q, K]; see `TokenModel.forward`.
        Of row ends it says whether their owners are seen."""
        if visible is None:
            return self._slots[: self.first + self.limit - self.prefix] <= slots[..., None]
        nowhere = (slots == len(self.places) - 1)[..., None]
        parts = [visible[..., self.slots :], nowhere, visible[..., : self.limit]]
        if len(self.owners):
            parts.insert(0, visible[..., self.owners])
        return torch.cat(parts, dim=-1)

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Let `images` [M] be those of `other`, a cache of M images with as many slots, whose prompts are not longer."""
        rows, first = self.rows(images), self.size - other.size
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            mine[:, :, first:].index_copy_(0, rows.to(mine.device), theirs)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, index = self._rows.to(keys.device), self._index.to(keys.device)
        for cached, states in ((self.keys[layer], keys), (self.values[layer], values)):
            # Under torch.autocast the states are not in the dtype of the weights.
            cached[rows, :, index] = states.transpose(1, 2).to(cached.dtype)
        return self.keys[layer][:, :, : self.length], self.values[layer][:, :, : self.length]


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

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        source, target = self.index(source), self.index(target)
        rows = torch.arange(len(source), device=source.device)[:, None]
        for states in (self.keys, self.values):
            states[:, rows, :, target] = states[:, rows, :, source]

    def expand(self, images: torch.LongTensor) -> None:
        self.take_rows(self.rows(images))

    def take_rows(self, rows: torch.LongTensor) -> None:
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]


class SlotCache(StackedCache, PlacedCache):
    """A `KeyValueCache` of a prompt, an image and a tree.

    Args:
        prefix, slots, scratch: how many slots the prompt, the image and the tree have.
        groups: 1, or 2 when the rows are those of the images once with and once without the condition.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        prefix: int,
        slots: int,
        scratch: int = 0,
        **settings,
    ):
        self.lay_out(prefix, slots, scratch, torch.empty(0, dtype=torch.long, device=settings["device"]))
        super().__init__(layers, rows, heads, head_dim, size=self.size, prefix=self.prefix, **settings)


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
        self.places = torch.arange(prefix, prefix + slots + 1, device=self.keys.device)
        self.filled = self.length = 0
        self.modulations = None

    def write_next(self, count: int) -> None:
        """Let the next forward pass write `count` tokens behind those that are there."""
        self.filled, self.length = self.length, self.length + count

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[layer, :, :, self.filled : self.length] = keys
        self.values[layer, :, :, self.filled : self.length] = values
        return self.keys[layer, :, :, : self.length], self.values[layer, :, :, : self.length]

    def take_rows(self, rows: torch.LongTensor) -> None:
        if self.modulations is not None:
            self.modulations = [tuple(part[rows] for part in layer) for layer in self.modulations]
        super().take_rows(rows)
