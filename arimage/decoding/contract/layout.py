"""The grid of the tokens of an image or a video, and the order in which they are generated."""

import copy
import math
from collections.abc import Sequence

import torch


class Layout:
    """The grid of tokens of each image or video, and the order in which they are generated.

    A *place* is an index into the flattened grid. A *rank* is an index into the order of generation: rank 0 is
    generated first. Without an `order` both are the same. This is the raster order: frame after frame, row by row,
    from left to right. Grids `before` the image are generated first, one after the other, each in raster order.

    Args:
        shape: (rows, columns), or (frames, rows, columns).
        order: int64 [B, N], the place of each rank, one permutation of 0 .. N - 1 per image; None is the raster order.
        before: the shapes (rows, columns) of the grids that are generated before an image, none by default.

    Attributes:
        num_tokens: N, the number of places of all grids together.
        columns: tokens per row of the image.
        rows: rows of the image, or of all frames together.

    Raises:
        ValueError: if a shape does not have two or three positive sizes, the order is not one permutation per image,
            or there are grids before a video or before an image with an order.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        order: torch.LongTensor | None = None,
        before: Sequence[tuple[int, int]] = (),
    ):
        self.shape, self.before = tuple(shape), tuple(map(tuple, before))
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise ValueError(f"shape is {shape}: give (rows, columns) or (frames, rows, columns)")
        if self.before and (order is not None or len(self.shape) == 3):
            raise ValueError("before is for an image in raster order: give no order and no frames")
        if any(len(grid) != 2 or min(grid) < 1 for grid in self.before):
            raise ValueError(f"before is {before}: give the (rows, columns) of each grid")
        self.num_tokens = sum(map(math.prod, self.grids))
        self.columns = self.shape[-1]
        self.rows = math.prod(self.shape) // self.columns
        self.order = order
        self._rank_of = None
        if order is not None:
            raster = torch.arange(self.num_tokens, device=order.device)
            if order.ndim != 2 or order.shape[1] != self.num_tokens or (order.sort(dim=1).values != raster).any():
                raise ValueError(f"order must be [B, {self.num_tokens}], a permutation of the places for each image")
            self._rank_of = order.argsort(dim=1)

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all grids in the order of generation; the last is the image."""
        return *self.before, self.shape

    def take(self, images: torch.LongTensor) -> "Layout":
        """The layout of a batch of the `images` [M], in this order."""
        other = copy.copy(self)
        if self.order is not None and self._rank_of is not None:
            other.order, other._rank_of = self.order[images], self._rank_of[images]
        return other

    def put(self, images: torch.LongTensor, other: "Layout") -> None:
        """Overwrite the orders of `images` [M], in place, with those of `other`, a layout of M images."""
        if self.order is not None and self._rank_of is not None:
            self.order.index_copy_(0, images, other.order)
            self._rank_of.index_copy_(0, images, other._rank_of)

    def places(self, ranks: torch.LongTensor) -> torch.LongTensor:
        """The places [B, Q], in 0 .. N - 1, of the tokens with `ranks` [B, Q]."""
        return ranks if self.order is None else self.order.gather(1, ranks)

    def ranks(self, places: torch.LongTensor) -> torch.LongTensor:
        """The ranks [B, Q], in 0 .. N - 1, of the tokens at `places` [B, Q]."""
        return places if self._rank_of is None else self._rank_of.gather(1, places)

    def neighbours(self, ranks: torch.LongTensor, offset: tuple[int, ...]) -> torch.LongTensor:
        """The ranks [B, Q] of the tokens at `offset` from the tokens with `ranks` [B, Q]; -1 outside of the grid.

        An offset has one component per axis of the shape: (-1, 0) is the same column one row up, (-1, 0, 0) the same
        place one frame earlier. A shorter offset applies to the last axes. Tokens of several grids have neighbours in
        their own grid only.
        """
        place, neighbours, first = self.places(ranks), torch.full_like(ranks, -1), 0
        for shape in self.grids:
            target, inside = _moved(place - first, shape, offset)
            neighbours = torch.where(inside, target + first, neighbours)
            first += math.prod(shape)
        return torch.where(neighbours < 0, -1, self.ranks(neighbours.clamp(min=0)))

    def to_places(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange values [B, N] by rank, on any device, to values [B, *shape] by place, of the image alone."""
        return self.parts(values)[-1]

    def parts(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Rearrange values [B, N] by rank, on any device, to values by place of each of `grids`, [B, *grid]."""
        values = values if self._rank_of is None else values.gather(1, self._rank_of.to(values.device))
        parts = values.split([math.prod(grid) for grid in self.grids], dim=1)
        return [part.unflatten(1, grid) for part, grid in zip(parts, self.grids, strict=True)]

    def current(self, values: torch.Tensor, known: torch.BoolTensor) -> torch.Tensor:
        """The values [1, N] by rank of one image by place of the grid that is generated, [1, *grid]: the last one in
        which any token is `known` [1, N]."""
        parts, begun = self.parts(values), [bool(part.any()) for part in self.parts(known)]
        return next(
            (part for part, any_known in zip(reversed(parts), reversed(begun), strict=True) if any_known), parts[0]
        )

    def fill(self, tokens: torch.LongTensor) -> torch.LongTensor:
        """Tokens [B, N] by rank, with a known one near it in place of each unknown one, -1, where its grid has one."""
        return self.to_ranks(*map(_spread, self.parts(tokens)))

    def to_ranks(self, *parts: torch.Tensor) -> torch.Tensor:
        """Rearrange values by place of each of `grids`, [B, *grid], on any device, to values [B, N] by rank."""
        values = torch.cat([part.flatten(1) for part in parts], dim=1)
        return values if self.order is None else values.gather(1, self.order.to(values.device))


def _spread(tokens: torch.LongTensor) -> torch.LongTensor:
    """`Layout.fill` of one grid [B, *grid] by place: known tokens grow by one place along every axis at a time."""
    for _ in range(sum(tokens.shape[1:])):
        if (tokens >= 0).all():
            break
        for axis in range(1, tokens.ndim):
            edge = torch.full_like(tokens.narrow(axis, 0, 1), -1)
            inner = tokens.shape[axis] - 1
            for parts in ([edge, tokens.narrow(axis, 0, inner)], [tokens.narrow(axis, 1, inner), edge]):
                tokens = torch.where(tokens < 0, torch.cat(parts, axis), tokens)
    return tokens


def _moved(
    place: torch.LongTensor, shape: tuple[int, ...], offset: tuple[int, ...]
) -> tuple[torch.LongTensor, torch.BoolTensor]:
    """The places at an offset from places of a grid, and whether both are inside of it."""
    inside, target, stride = (place >= 0) & (place < math.prod(shape)), place, 1
    offset = (0,) * (len(shape) - len(offset)) + tuple(offset)
    for size, step in zip(reversed(shape), reversed(offset), strict=True):
        coordinate = place.div(stride, rounding_mode="floor") % size + step
        inside = inside & (coordinate >= 0) & (coordinate < size)
        target = target + step * stride
        stride *= size
    return target, inside
