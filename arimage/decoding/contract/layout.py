"""The grid of the tokens of an image or a video, and the order in which they are generated."""

import copy
import math

import torch


class Layout:
    """The grid of tokens of each image or video, and the order in which they are generated.

    A *place* is an index into the flattened grid. A *rank* is an index into the order of generation: rank 0 is
    generated first. Without an `order` both are the same. This is the raster order: frame after frame, row by row,
    from left to right.

    Args:
        shape: (rows, columns), or (frames, rows, columns).
        order: int64 [B, N], the place of each rank, one permutation of 0 .. N - 1 per image; None is the raster order.

    Attributes:
        num_tokens: N, the number of places.
        columns: tokens per row.
        rows: rows of all frames together.

    Raises:
        ValueError: if the shape does not have two or three positive sizes, or the order is not one permutation per
            image.
    """

    def __init__(self, shape: tuple[int, ...], order: torch.LongTensor | None = None):
        self.shape = tuple(shape)
        if len(self.shape) not in (2, 3) or min(self.shape) < 1:
            raise ValueError(f"shape is {shape}: give (rows, columns) or (frames, rows, columns)")
        self.num_tokens = math.prod(self.shape)
        self.columns = self.shape[-1]
        self.rows = self.num_tokens // self.columns
        self.order = order
        self._rank_of = None
        if order is not None:
            raster = torch.arange(self.num_tokens, device=order.device)
            if order.ndim != 2 or order.shape[1] != self.num_tokens or (order.sort(dim=1).values != raster).any():
                raise ValueError(f"order must be [B, {self.num_tokens}], a permutation of the places for each image")
            self._rank_of = order.argsort(dim=1)

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
        place one frame earlier. A shorter offset applies to the last axes.
        """
        place = self.places(ranks)
        target, inside, stride = place, torch.ones_like(place, dtype=torch.bool), 1
        offset = (0,) * (len(self.shape) - len(offset)) + tuple(offset)
        for size, step in zip(reversed(self.shape), reversed(offset), strict=True):
            coordinate = place.div(stride, rounding_mode="floor") % size + step
            inside = inside & (coordinate >= 0) & (coordinate < size)
            target = target + step * stride
            stride *= size
        return torch.where(inside, self.ranks(torch.where(inside, target, 0)), -1)

    def to_places(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange values [B, N] by rank, on any device, to values [B, *shape] by place."""
        values = values if self._rank_of is None else values.gather(1, self._rank_of.to(values.device))
        return values.unflatten(1, self.shape)

    def to_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange values [B, *shape] by place to values [B, N] by rank."""
        values = values.flatten(1)
        return values if self.order is None else values.gather(1, self.order)
