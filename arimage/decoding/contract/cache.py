"""What a decoding asks of the cache of a model that generates tokens one after another."""

from typing import Protocol, Self

import torch


class Cache(Protocol):
    """The keys and values of the images of one call, as `prefill` returns them. Slots name the places of tokens: those
    of the N ranks, then the scratch slots.

    Attributes:
        limit: to how many of the N slots forward passes attend, all by default. They may feed lower slots only.
    """

    limit: int

    def move(self, source: torch.LongTensor, target: torch.LongTensor) -> None:
        """Copy the slots `source` [B, M] to the slots `target` [B, M]; a target of -1 copies nowhere."""

    def expand(self, images: torch.LongTensor) -> None:
        """Make image j of the cache a copy of what was image `images[j]`, [M]."""

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Replace `images` [M] by those of `other`, a cache of M images of the same model and layout."""
