"""The conditions of the images of one call: classes, texts or given tokens."""

from collections.abc import Hashable, Sequence
from typing import Self

import torch
import torch.nn.functional as F


# Names of embeddings, of which equal ones are equal.
Names = Sequence[Hashable] | None


class Conditions:
    """The conditions of the B images of a call, as the rows that attention sees.

    Without guidance there is one row per image. Under guidance the B rows with a condition are followed by the B rows
    without it, or first by those without a part of it. After `merge`, rows with equal conditions share one copy, and a
    prefill computes it once.

    Args:
        values: the conditions by name, [branches * B, ...] each.
        branches: rows per image: 1, or more under guidance.
        seen: bool [branches * B, P], which positions of its prefix a row sees; None without a prefix, for which P is
            0.
        ids: int64 [branches * B, P], what the embeddings among the values were looked up by; None where they come from
            elsewhere.
        alike: whether the embeddings of all rows without a condition are equal.
    """

    def __init__(
        self,
        values: dict[str, torch.Tensor],
        branches: int = 1,
        seen: torch.BoolTensor | None = None,
        ids: torch.LongTensor | None = None,
        alike: bool = False,
    ):
        first = next(iter(values.values()))
        self.seen = first.new_ones(len(first), 0, dtype=torch.bool) if seen is None else seen
        self.branches, self._values, self.ids, self.alike = branches, values, ids, alike
        # The index of each row's condition in `_values`. None: row i has condition i.
        self._index: list[int] | None = None

    @property
    def images(self) -> int:
        """B, the number of images."""
        return len(self.seen) // self.branches

    @property
    def prefix_length(self) -> int:
        """P, the length of the prefix."""
        return self.seen.shape[1]

    @property
    def key(self) -> Hashable:
        """What conditions must have in common for `put`, in models whose forward passes depend on all shapes."""
        return (
            self.branches,
            self.prefix_length,
            tuple((name, value.shape[1:]) for name, value in self._values.items()),
        )

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The conditions of all rows by name, [branches * B, ...] each."""
        return self._values if self._index is None else self._at(self._index)

    def _at(self, index: list[int]) -> dict[str, torch.Tensor]:
        return {name: value[index] for name, value in self._values.items()}

    def merge(self, *names: Names) -> None:
        """Let rows with equal conditions share one copy. Reads the device, but no embeddings.

        Args:
            names: for every branch, a name for each of its B embeddings, without `ids`: those with equal names are
                equal. None, or left out: each may differ from all others, unless they are `alike`.
        """
        if self._index is not None:
            return
        embedded = {name for name, value in self._values.items() if value.is_floating_point() and value.ndim > 2}
        compared = [value for name, value in self._values.items() if name not in embedded]
        keys: list[Hashable] = [None] * len(self.seen)
        if self.ids is not None:
            compared.append(self.ids.to(self.seen.device))
        elif embedded:
            given = dict(enumerate(names)) | ({1: [None] * self.images} if self.alike else {})
            keys = [(i, name) for i in range(self.branches) for name in given.get(i) or range(self.images)]
        first, self._index = distinct(keys)
        if compared and len(first) < len(keys):
            first, self._index = distinct(list(zip(keys, row_bits(*compared), strict=True)))
        if len(first) < len(keys):
            self._values = self._at(first)
        self.ids = None

    def to_prefill(self, batch_size: int, shared: bool = True) -> tuple[dict[str, torch.Tensor], Sequence[int]]:
        """The D conditions to prefill, [D, ...] each, and the index of each row's condition among them. Without
        `shared` every row has its own.

        Raises:
            ValueError: if there are not `batch_size` images.
        """
        if batch_size != self.images:
            raise ValueError(f"batch_size is {batch_size}, but the model is bound to {self.images} images")
        if self._index is None or not shared:
            return self.values, range(len(self.seen))
        first, copies = distinct(self._index)
        return self._at([self._index[row] for row in first]), copies

    def take(self, images: torch.LongTensor) -> Self:
        """The conditions of `images` [M], in this order."""
        rows = rows_of(images, self.branches, self.images)
        values, index, ids = self._values, self._index, self.ids
        if index is None:
            values = {name: value[rows] for name, value in values.items()}
            ids = None if ids is None else ids[rows]
        other = type(self)(values, self.branches, self.seen[rows], ids, self.alike)
        other._index = None if index is None else [index[row] for row in rows.tolist()]
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """Let the rows of `images` [M] see the prefixes of `other`, conditions of M images, in place. Prefixes end
        together, and longer ones make room on the left. Returns whether `seen` is another tensor now.

        `values` stay as they were: they serve prefills, and the prefixes of `other` are already in its cache.
        """
        more = other.prefix_length - self.prefix_length
        if more > 0:
            self.seen = F.pad(self.seen, (more, 0))
        rows = rows_of(images, self.branches, self.images)
        self.seen.index_copy_(0, rows, F.pad(other.seen, (max(-more, 0), 0)))
        return more > 0

    def put_values(self, images: torch.LongTensor, other: Self) -> bool:
        """`put`, which also replaces the values, of the same shape and not merged: forward passes read them."""
        rows = rows_of(images, self.branches, self.images)
        for name, value in self._values.items():
            value.index_copy_(0, rows, other.values[name])
        return self.put(images, other)

    def visible_keys(self, prefix_end: int, image: torch.BoolTensor) -> torch.BoolTensor:
        """The keys that queries see, bool [branches * B, Q, prefix_end + K]: those of the prefix, which ends at
        `prefix_end`, and those of the image in `image` [B, Q, K]."""
        keys = F.pad(self.seen, (prefix_end - self.prefix_length, 0))[:, None].expand(-1, image.shape[1], -1)
        return torch.cat([keys, image.repeat(self.branches, 1, 1)], dim=-1)


def with_unconditional(condition: dict[str, torch.Tensor], kept: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The conditions of B images [B, ...] as those of 2 B rows for classifier-free guidance: the images, then the same
    images without a condition. `unconditional`, bool [2 B], says which is which. Rows without a condition keep the
    values `kept`, and all else is ones there."""
    doubled = {
        name: torch.cat([value, value if name in kept else torch.ones_like(value)])
        for name, value in condition.items()
    }
    first = next(iter(condition.values()))
    doubled["unconditional"] = torch.arange(2 * len(first), device=first.device) >= len(first)
    return doubled


def spread(cache, copies: Sequence[int], *outputs: torch.Tensor) -> Sequence[torch.Tensor]:
    """From D prefilled conditions to all rows: expand the cache, and return the outputs [D, ...] as [rows, ...]. Row i
    has condition `copies[i]`."""
    if len(outputs[0]) == len(copies):
        return outputs
    rows = torch.tensor(copies, device=outputs[0].device)
    cache.take_rows(rows)
    return [output[rows] for output in outputs]


def distinct(values: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The index of the first of each distinct value, and for each value the number of its distinct value."""
    first: dict[Hashable, int] = {}
    for i, value in enumerate(values):
        first.setdefault(value, i)
    numbers = {value: number for number, value in enumerate(first)}
    return list(first.values()), [numbers[value] for value in values]


def row_bits(*tensors: torch.Tensor) -> list[bytes]:
    """The bits of the rows of tensors [R, ...] of whole numbers or flags, R in all. Reads the device."""
    rows = torch.cat([tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None] for tensor in tensors], dim=1)
    return [row.tobytes() for row in rows.cpu().numpy()]


def rows_of(images: torch.LongTensor, branches: int, count: int) -> torch.LongTensor:
    """The rows [branches * M] of `images` [M] among the rows of `count` images."""
    return torch.cat([images + branch * count for branch in range(branches)])


def check_image(layout, family: str) -> None:
    """Raise a `ValueError` if a `Layout` has three dimensions, or grids before the image."""
    if len(layout.shape) != 2:
        raise ValueError(f"layout has shape {layout.shape}: {family} generates images, give (rows, columns)")
    if layout.before:
        raise ValueError(f"layout has grids before the image: {family} generates one grid only, give none")


def check_raster(layout, family: str) -> None:
    """Raise a `ValueError` if a `Layout` has three dimensions, an order, or grids before the image."""
    check_image(layout, family)
    if layout.order is not None:
        raise ValueError(f"layout has an order: {family} generates in raster order only, give none")
