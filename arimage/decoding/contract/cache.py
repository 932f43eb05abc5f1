"""The key-value caches that decodings expect of models."""

from typing import Protocol, Self

import torch


class ImageCache(Protocol):
    """The keys and values of the images of one call, as `prefill` returns them. A class that has this Protocol as its
    base need not define `allocate`."""

    def allocate(self) -> None:
        """Allocate what the prefill of a `compact` model left out, see `BoundModel`."""

    def expand(self, images: torch.LongTensor) -> None:
        """Make image j of the cache a copy of the former image `images[j]`, [M]."""

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Overwrite `images` [M] with the images of `other`, a cache of M images of the same model and layout."""


class Cache(ImageCache, Protocol):
    """The cache of a model that generates tokens one after another. There is one slot for each of the N ranks,
    followed by the scratch slots.

    Attributes:
        attended_slots: forward passes attend to the first `attended_slots` of the N slots, and may write to those
            only. All by default.
        finds_ends: whether the last forward pass found on the device which slots are in use. Then `attended_slots` is
            all slots, and stays so: steps launch the same kernels however far the images are.
    """

    attended_slots: int
    finds_ends: bool = False

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        """Copy the slots `source` [B, M] to the slots `target` [B, M]; a target of -1 copies nowhere."""

    def likeness(self, slots: torch.LongTensor) -> torch.FloatTensor:
        """How much the keys in each of `slots` [B, M] resemble those in the others, float32 [B, M]: the sums of their
        cosines, over layers and heads. Only in the cache of a `RasterModel`."""
        ...
