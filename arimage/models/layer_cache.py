"""What masked transformers keep of the layers in a forward pass for later ones."""

from typing import Any, Self

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


class MaskedContext(LayerCache):
    """The context of a `MaskedTokenModel`, with a slot for each of its rows.

    Args:
        logits: how many slots have logits, too, the first ones, and for how many tokens; None keeps keys and values
            alone.

    Attributes:
        logits: [G, B, L, V], those of the last pass that evaluated a row; None where none are kept.
    """

    def __init__(self, layers: int, rows: int, *shape: int, logits: tuple[int, int] | None = None, **settings):
        super().__init__(layers, rows, *shape, **settings)
        self._logits: torch.Tensor | None = None
        if logits is not None:
            # The last one is nowhere.
            self._logits = self.keys[0].new_zeros(rows, logits[0] + 1, logits[1])

    @classmethod
    def of(cls, model: Any, batch_size: int, kept_logits: int | None) -> Self:
        """An empty context of a model, for so many images and the logits of so many slots, see `logits`."""
        config = model.network.config
        return cls(
            config.num_layers,
            batch_size * model.branches,
            config.get("num_key_value_heads") or config.num_attention_heads,
            model.network.head_dim,
            model.num_rows,
            logits=None if kept_logits is None else (kept_logits, model.vocab_size),
            branches=model.branches,
            dtype=model.network.dtype,
            device=model.device,
        )

    @property
    def logits(self) -> torch.Tensor | None:
        if self._logits is None:
            return None
        return self._logits[:, :-1].unflatten(0, (self.branches, -1))

    def write_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Write the logits [rows, Q, V] of the slots that a forward pass wrote to, or of all. Returns those of all
        slots [rows, L + 1, V]."""
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
