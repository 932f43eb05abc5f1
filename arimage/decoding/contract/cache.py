"""The key-value cache that a decoding expects of a model that generates tokens one after another."""

from typing import Protocol, Self

import torch


class Cache(Protocol):
    """The keys and values of the images of one call, as `prefill` returns them. There is one slot for each of the N
    ranks, followed by the scratch slots.

    Attributes:
        limit: forward passes attend to the first `limit` of the N slots, and may write to those only. All by default.

    The cache of a `compact` model has only the slots that the prefill fills, so that images which are `put` into
    another cache take little memory of their own; `allocate()` allocates the others. It also has `nbytes`, its size.

    Where forward passes can find on the device which slots are in use, it has `finds_ends`: whether the last one did.
    Then `limit` is all slots, and stays so: steps launch the same kernels however far the images are.
    """

    limit: int

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        """Copy the slots `source` [B, M] to the slots `target` [B, M]; a target of -1 copies nowhere."""

    def likeness(self, slots: torch.LongTensor) -> torch.FloatTensor:
        """How much the keys in each of `slots` [B, M] resemble those in the others, float32 [B, M]: the sums of their
        cosines, over layers and heads. Only where `prefill` takes `slots`."""
        ...

    def expand(self, images: torch.LongTensor) -> None:
        """Make image j of the cache a copy of the former image `images[j]`, [M]."""

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Overwrite `images` [M] with the images of `other`, a cache of M images of the same model and layout."""
