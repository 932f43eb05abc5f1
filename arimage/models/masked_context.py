"""What masked transformers keep of a forward pass over all rows for passes over few."""

from typing import Self

import torch

from .layer_cache import LayerCache


class MaskedContext(LayerCache):
    """The context of a `MaskedTokenModel`, with a slot for each of its rows.

    Args:
        logits: how many slots have logits, too, the first ones, and for how many tokens; None keeps keys and values
            alone.

    Attributes:
        logits: [G, B, L, V], those of the last pass that evaluated a row; None where none are kept.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        slots: int,
        *,
        logits: tuple[int, int] | None = None,
        **settings,
    ):
        super().__init__(layers, rows, heads, head_dim, slots, **settings)
        self._logits: torch.Tensor | None = None
        if logits is not None:
            # The last one is nowhere.
            self._logits = self.keys[0].new_zeros(rows, logits[0] + 1, logits[1])

    @property
    def logits(self) -> torch.Tensor | None:
        if self._logits is None:
            return None
        return self._logits[:, :-1].unflatten(0, (self.branches, -1))

    def write_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Keep the logits [rows, Q, V] of the slots that a pass wrote to, or of all that have logits; return those
        [rows, L + 1, V] of all."""
        assert self._logits is not None
        logits, last = logits.detach().to(self._logits.dtype), self._logits.shape[1] - 1
        if self._index is None:
            self._logits[:, :last] = logits
        else:
            self._logits[self._rows, self._index.clamp(max=last)] = logits
        return self._logits

    def put(self, images: torch.LongTensor, other: Self) -> None:
        super().put(images, other)
        if self._logits is not None and other._logits is not None:
            self._logits.index_copy_(0, self.rows(images), other._logits)

    def take_rows(self, rows: torch.LongTensor) -> None:
        super().take_rows(rows)
        if self._logits is not None:
            self._logits = self._logits[rows]
