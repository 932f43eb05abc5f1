"""What masked transformers keep of the layers in a forward pass for later ones."""

from typing import Self

import torch

from .cache import StackedCache


class LayerCache(StackedCache):
    """Keys and values of the layers of a masked transformer, in so many slots and one for what is thrown away.

    Rows are those of the images, and under guidance also of the same images without a condition, unless only the first
    ones are kept.

    Args:
        slots: how many slots there are; slot `slots` is nowhere.
        settings: `branches`, `dtype` and `device`, see `StackedCache`.
    """

    def __init__(self, layers: int, rows: int, heads: int, head_dim: int, slots: int, **settings):
        super().__init__(layers, rows, heads, head_dim, size=slots + 1, prefix_end=0, **settings)
        self.size, self._index, self.attended = slots + 1, None, 0

    def write_all(self) -> None:
        """Let the next forward pass write all of its keys and values to the first slots, and attend to these only."""
        self._index = None

    def write_at(self, slots: torch.LongTensor, attended: int) -> None:
        """Let the next layers write at `slots` [rows, Q] and attend to the first `attended` slots."""
        self._rows = torch.arange(len(slots), device=slots.device)[:, None]
        self._index, self.attended = slots, attended

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the keys and values [rows, heads, Q, head_dim] of a layer; return those that the queries attend to."""
        kept = self.of_layer(layer)
        for cached, states in zip(kept, (keys, values), strict=True):
            # No gradients are kept, and under torch.autocast the states are not in the dtype of the weights.
            states = states[: len(cached)].detach().to(cached.dtype)
            if self._index is None:
                cached[:, :, : states.shape[2]] = states
            else:
                cached[self._rows, :, self._index] = states.transpose(1, 2)
        if self._index is None:
            return keys, values
        return kept[0][:, :, : self.attended], kept[1][:, :, : self.attended]

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """Replace `images` [M] by those of `other`."""
        for mine, theirs in zip(self.stacks, other.stacks, strict=True):
            mine.index_copy_(1, self.rows(images), theirs)
