"""The key/value caches of one call: allocated once, never rolled back."""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F

from .conditions import rows_of


class StackedCache:
    """Base of the caches: keys and values of the images of one call.

    Images are the B images of the call. Rows are what attention sees: the images, under guidance followed by the same
    images without a condition. Slots number the tokens as decodings do: slot 0 holds the first image token,
    and -1 is nowhere.

    Attributes:
        stacks: alternately keys and values of layers of one shape and device, [layers, rows, heads, size, head_dim].
        keys, values: per layer, [rows, heads, size, head_dim]: views that are made outside of steps, since a compiled
            step copies a whole stack when it writes to a view that it made itself.
        size: the third dimension of the keys once all are allocated, see `allocate`.
        attended: how many keys the queries of the current forward pass attend to, which is the width of their mask.
        prefix_end: where the prompt ends along the third dimension of the keys. All slots lie after it.
        branches: rows per image.
        index_of: int64 [slots + 1], the index of each slot along the third dimension of the keys; the last is nowhere.
        conditions: what else every forward pass reads of the rows, per layer, [rows, ...] each.
    """

    stacks: Sequence[torch.Tensor]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]
    size: int
    attended: int
    prefix_end: int
    branches: int
    index_of: torch.LongTensor
    conditions: Sequence[tuple[torch.Tensor, ...]] = ()
    # See `Cache`.
    finds_ends = False

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        size: int,
        prefix_end: int,
        branches: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        keys = torch.zeros(layers, rows, heads, size, head_dim, dtype=dtype, device=device)
        self._set_stacks(keys, torch.zeros_like(keys))
        self.prefix_end, self.branches = prefix_end, branches

    def _set_stacks(self, *stacks: torch.Tensor) -> None:
        self.stacks = stacks
        self.keys, self.values = ([layer for stack in stacks[kind::2] for layer in stack] for kind in (0, 1))

    @property
    def allocated(self) -> int:
        """The third dimension of the keys so far."""
        return self.keys[0].shape[2]

    def allocate(self) -> None:
        """Allocate all slots, with the prefill in the first ones."""
        missing = self.size - self.allocated
        if missing:
            self._set_stacks(*(F.pad(stack, (0, 0, 0, missing)) for stack in self.stacks))

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.keys, *self.values))

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, [rows, heads, size, head_dim] each, to be written in place."""
        return self.keys[layer], self.values[layer]

    def index(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Indices [rows, Q] along the third dimension of the keys of slots [B, Q]; -1 is nowhere."""
        return self.index_of[slots].repeat(self.branches, 1)

    def rows(self, images: torch.LongTensor) -> torch.LongTensor:
        """The rows [branches * M] of `images` [M]."""
        return rows_of(images, self.branches, len(self.keys[0]) // self.branches)

    def entries(self, slots: torch.LongTensor) -> torch.LongTensor:
        """Where all that belongs to slots [B, M] lies along the third dimension of the keys, [B, M or more]."""
        return self.index_of[slots]

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        """Copy the slots `source` [B, M] to the slots `target` [B, M]; a target of -1 copies nowhere."""
        images = torch.arange(len(source), device=source.device)[:, None]
        places = images, self.entries(source), self.entries(target)
        for stack in self.stacks:
            at, source, target = (index.to(stack.device) for index in places)
            branches = stack.unflatten(1, (self.branches, -1))
            branches[:, :, at, :, target] = branches[:, :, at, :, source]

    def expand(self, images: torch.LongTensor) -> None:
        """Make image j of the cache a copy of what was image `images[j]`, [M]."""
        self.take_rows(self.rows(images))

    def take_rows(self, rows: torch.LongTensor) -> None:
        """Make row j of the cache a copy of what was row `rows[j]`, [R]."""
        self.conditions = [tuple(part[rows] for part in layer) for layer in self.conditions]
        self._set_stacks(*(stack[:, rows.to(stack.device)] for stack in self.stacks))

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Replace `images` [M] by those of `other`, a cache of M images of the same prompt length."""
        self._put_keys(self.rows(images), other)
        for mine, theirs in zip(self.conditions, other.conditions, strict=True):
            for part, new in zip(mine, theirs, strict=True):
                part.index_copy_(0, self.rows(images), new)

    def _put_keys(self, rows: torch.LongTensor, other: Self) -> None:
        for mine, theirs in zip(self.stacks, other.stacks, strict=True):
            mine[:, :, :, : other.allocated].index_copy_(1, rows, theirs)


class SlottedCache(StackedCache):
    """A cache whose tokens are written at any slot.

    Along the third dimension of the keys lie the prompt, padded on the left; the row ends; the scratch slots; one
    entry for what is thrown away; and the image slots, of which queries attend to the first `attended_slots`.

    Attributes:
        prompt: how many tokens the prompts have.
        slots, scratch: how many slots the image and the trees have, numbered 0 .. slots + scratch - 1.
        owners: int64 [E], the slot that each row end belongs to.
        first: the place of the image's first slot. After a prefill that fills no image slots, only the entries before
            it are allocated.
        attended_slots: to how many of the image slots forward passes attend, all by default. They may feed lower slots
            only.
    """

    def lay_out(self, prompt: int, slots: int, scratch: int, owners: torch.LongTensor) -> None:
        self.prompt, self.slots, self.scratch, self.owners = prompt, slots, scratch, owners
        between = len(owners) + scratch + 1
        # On a GPU, attention copies a mask in every layer unless its rows begin at multiples of 16.
        self.first = -(-(prompt + between) // 16) * 16
        self.prefix_end, self.size, self.attended_slots = self.first - between, self.first + slots, slots
        indices = torch.arange(self.prefix_end + len(owners), self.size, device=owners.device)
        self.index_of = indices.roll(-scratch - 1)
        # The slot at each index after the prompt. Padding has the last, nowhere, and sees it: no row of a mask is
        # empty.
        self._slots = torch.cat([owners, torch.arange(len(indices), device=owners.device).roll(scratch + 1)])

    def leave_ends(self, found: bool) -> None:
        """Set `finds_ends`, and attend to all slots if it is True."""
        self.finds_ends = found
        if found:
            self.attended_slots = self.slots

    def write_next_at(self, index: torch.LongTensor, attended: int | None = None) -> None:
        """Let the next forward pass write at `index` [rows, Q] and attend to the first `attended` keys, by default to
        all up to the last attended slot."""
        self._rows, self._index = torch.arange(len(index), device=index.device)[:, None], index
        self.attended = self.first + self.attended_slots if attended is None else attended

    def write_slots(self, slots: torch.LongTensor) -> None:
        """Let the next forward pass write at `slots` [B, Q], after the prefill."""
        self.allocate()
        self.write_next_at(self.index(slots))

    def write_prompts(self, count: int, length: int, start: int = 0, stop: int | None = None) -> None:
        """Let the next forward pass write the tokens start .. stop - 1, by default all, of `count` prompts of `length`
        tokens, and attend to those before `stop`."""
        begin, stop = self.prefix_end - length, length if stop is None else stop
        index = torch.arange(begin + start, begin + stop, device=self.index_of.device)
        self.write_next_at(index.expand(count, -1), begin + stop)

    def slots_of(self, positions: torch.LongTensor, slots: torch.LongTensor | None) -> torch.LongTensor:
        """The slots [B, Q] of queries; that of padding is the last, nowhere. See `TokenModel.forward`."""
        own = positions if slots is None else torch.where(positions < 0, -1, slots)
        return own.remainder(len(self.index_of))

    def seen(self, slots: torch.LongTensor, visible: torch.BoolTensor | None) -> torch.BoolTensor:
        """The keys between the prompt and the last attended slot that queries at `slots` [B, Q] see, bool [B, Q, K];
        see `TokenModel.forward`. A row end is seen where its owner is."""
        if visible is None:
            return self._slots[: self.first + self.attended_slots - self.prefix_end] <= slots[..., None]
        nowhere = (slots == len(self.index_of) - 1)[..., None]
        parts = [visible[..., self.slots :], nowhere, visible[..., : self.attended_slots]]
        if len(self.owners):
            parts.insert(0, visible[..., self.owners])
        return torch.cat(parts, dim=-1)

    def likeness(self, slots: torch.LongTensor) -> torch.FloatTensor:
        """See `arimage.decoding.contract.cache.Cache`."""
        self.allocate()
        index = self.index(slots)[None, :, None, :, None]
        likeness = torch.zeros(index.shape[1], index.shape[3], device=index.device, dtype=torch.float32)
        for stack in self.stacks[::2]:
            layers, _, heads, _, width = stack.shape
            at = index.to(stack.device).expand(layers, -1, heads, -1, width)
            keys = stack.gather(3, at)
            lengths = keys.norm(dim=-1, keepdim=True).clamp(min=1e-3)
            cosines = keys @ (keys.mT @ lengths.reciprocal()) / lengths
            likeness += cosines.sum((0, 2, 4), dtype=torch.float32).to(index.device)
        return likeness.unflatten(0, (self.branches, -1)).sum(0)

    def _put_keys(self, rows: torch.LongTensor, other: Self) -> None:
        """Prompts may be shorter in `other`, which has as many slots."""
        start = self.first - other.first
        for mine, theirs in zip((*self.keys, *self.values), (*other.keys, *other.values), strict=True):
            at = rows.to(mine.device)
            # Masked keys must be finite.
            mine.index_fill_(0, at, 0)
            mine[:, :, start : start + theirs.shape[2]].index_copy_(0, at, theirs)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values [rows, heads, Q, head_dim] of a layer; return those that the queries attend to,
        [rows, heads, attended, head_dim]."""
        rows, index = self._rows.to(keys.device), self._index.to(keys.device)
        all_keys, all_values = self.keys[layer], self.values[layer]
        for cached, states in ((all_keys, keys), (all_values, values)):
            # Under torch.autocast the states are not in the dtype of the weights. No gradients are kept, which would
            # tie all layers of a stack together.
            cached[rows, :, index] = states.detach().transpose(1, 2).to(cached.dtype)
        return all_keys[:, :, : self.attended], all_values[:, :, : self.attended]


class SlotCache(SlottedCache):
    """A cache of a prompt, an image and a tree.

    Args:
        prefix_length, slots, scratch: how many slots the prompt, the image and the tree have.
        filled: how many of the image slots to allocate for the prefill, which attends to these only; None for all.
        branches: 1, or 2 if the images are there once with and once without a condition.
    """

    def __init__(
        self, *shape: int, prefix_length: int, slots: int, scratch: int = 0, filled: int | None = None, **settings
    ):
        self.lay_out(prefix_length, slots, scratch, torch.empty(0, dtype=torch.long, device=settings["device"]))
        self.attended_slots = slots if filled is None else filled
        size = self.first + self.attended_slots
        super().__init__(*shape, size=size, prefix_end=self.prefix_end, **settings)

    def allocate(self) -> None:
        if self.allocated < self.size:
            super().allocate()
            self.attended_slots = self.slots


class ScaleCache(StackedCache):
    """A cache of a next-scale model.

    Attributes:
        fed_cells: how many cells of each scale are fed, where some are pruned; see `Pruning`.
        whole: the last scale whose cells are all fed.
        change: what the layers added to its hidden states, [rows, cells, C].
    """

    fed_cells: Sequence[int] = ()
    whole: int
    change: torch.Tensor

    def prune(self, fed_cells: Sequence[int], whole: int, width: int, dtype: torch.dtype) -> None:
        """Set `fed_cells` and `whole`, and allocate `change` for `width` channels."""
        self.fed_cells, self.whole = fed_cells, whole
        self.change = self.keys[0].new_zeros(len(self.keys[0]), fed_cells[whole], width, dtype=dtype)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (self.change.nbytes if self.fed_cells else 0)


class GrowingCache(ScaleCache):
    """A cache that is filled from the front, one scale per forward pass. The tokens after the last slot are attended
    to in their own forward pass and not kept.

    Args:
        prefix_length, slots: how many tokens of the prompt and of the image are kept.
        filled: how many of the image's tokens to allocate for the prefill; None for all.
        branches: as in `SlotCache`.

    Attributes:
        first: where the next forward pass writes.
    """

    first: int

    def __init__(self, *shape: int, prefix_length: int, slots: int, filled: int | None = None, **settings):
        self.size = prefix_length + slots + 1
        width = self.size if filled is None else min(prefix_length + filled, self.size)
        super().__init__(*shape, size=width, prefix_end=prefix_length, **settings)
        self.index_of = torch.arange(prefix_length, self.size, device=self.stacks[0].device)

    def write_next_at(self, first: int, count: int) -> None:
        """Let the next forward pass write `count` tokens after the `first` ones, and attend to all of these."""
        self.first, self.attended = first, first + count
        if min(self.attended, self.size - 1) > self.allocated:
            self.allocate()

    @property
    def keeps_all_or_none(self) -> bool:
        """Whether the tokens of the next forward pass are all kept or all not."""
        return self.attended < self.size or self.first == self.size - 1

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SlottedCache.write`. `keys` and `values` may be those of the first rows only."""
        rows, end = len(keys), min(self.attended, self.size - 1)
        attended = []
        for cached, states in zip(self.of_layer(layer), (keys, values), strict=True):
            # See `SlottedCache.write`.
            cached[:rows, :, self.first : end] = states[:, :, : end - self.first].detach()
            kept, rest = cached[:rows, :, :end], states[:, :, end - self.first :]
            attended.append(torch.cat([kept, rest.to(kept.dtype)], dim=2) if self.attended > end else kept)
        return attended[0], attended[1]

    def open(self, layer: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the next forward pass writes the keys and values of the first `rows` rows of a layer, at `first`, and
        what its queries attend to: [at least `rows`, heads, at least `attended`, head_dim] each. These are copies if
        no token is kept; see `keeps_all_or_none`."""
        keys, values = self.of_layer(layer)
        if self.attended < self.size:
            return keys, values
        copies = []
        for cached in (keys, values):
            copy = cached.new_empty(rows, cached.shape[1], self.attended, cached.shape[3])
            copy[:, :, : self.first] = cached[:rows, :, : self.first]
            copies.append(copy)
        return copies[0], copies[1]
