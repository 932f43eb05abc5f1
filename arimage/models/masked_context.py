"""What masked transformers keep of a forward pass over all rows for passes over few."""

from typing import Self

import torch

from .layer_cache import LayerCache


class MaskedContext(LayerCache):
    """The context of a `MaskedTokenModel`, with a slot for each of its rows.

    Args:
        vocab_size: keep the logits of all rows, too, of so many tokens; None keeps keys and values alone.

    Attributes:
        logits: [G, B, slots, V], those that the last pass over a row gave it; None where none are kept.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        slots: int,
        *,
        vocab_size: int | None = None,
        **settings,
    ):
        super().__init__(layers, rows, heads, head_dim, slots, **settings)
        self._logits: torch.Tensor | None = None
        if vocab_size is not None:
            self._logits = self.keys[0].new_zeros(rows, self.size, vocab_size)

    @property
    def logits(self) -> torch.Tensor | None:
        if self._logits is None:
            return None
        return self._logits[:, : self.size - 1].unflatten(0, (self.branches, -1))

    def write_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Keep the logits [rows, Q, V] of the slots that a pass wrote to; return those [rows, slots + 1, V] of all."""
        assert self._logits is not None
        logits = logits.detach().to(self._logits.dtype)
        if self._index is None:
            self._logits[:, : logits.shape[1]] = logits
        else:
            self._logits[self._rows, self._index] = logits
        return self._logits

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """See `LayerCache.put`."""
        super().put(images, other)
        if self._logits is not None and other._logits is not None:
            self._logits.index_copy_(0, self.rows(images), other._logits)

    def take_rows(self, rows: torch.LongTensor) -> None:
        """See `StackedCache.take_rows`."""
        super().take_rows(rows)
        if self._logits is not None:
            self._logits = self._logits[rows]
