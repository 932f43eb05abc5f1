"""What masked transformers keep of a forward pass for later ones."""

from typing import NamedTuple, Self

import torch

from ...models.cache import StackedCache


class LayerCache(StackedCache):
    """Keys and values of the layers of an encoder or a decoder, of so many slots and one for what is thrown away.

    Rows are those of the images, and under guidance also of the same images without a class, unless only the first
    ones are kept.
    """

    def __init__(self, blocks, rows: int, width: int, slots: int, **settings):
        heads = blocks[0].num_heads
        super().__init__(len(blocks), rows, heads, width // heads, size=slots + 1, prefix_end=0, **settings)
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


class MaskedContext:
    """The context that `MARTransformer.forward` writes and reads, of B images. It is an `ImageCache`.

    Attributes:
        encoder: slots of the buffers, and then of the visible tokens, in any order.
        decoder: slots of the buffers, and then of all places.
        known: int64 [B], how many visible tokens have keys in the encoder's cache.
        inputs: for lazy passes, what the decoder reads [B, rows + 1, C], the last row being nowhere; else None.
        difference: for lazy passes under guidance, what its layers make of all rows without a class less what they
            make of them with it, [B, rows, C]; else None.
    """

    def __init__(
        self,
        encoder: LayerCache,
        decoder: LayerCache,
        known: torch.LongTensor,
        inputs: torch.Tensor | None = None,
        difference: torch.Tensor | None = None,
    ):
        self.encoder, self.decoder, self.known = encoder, decoder, known
        self.inputs, self.difference = inputs, difference

    @property
    def size(self) -> int:
        """The number of rows: buffers and places."""
        return self.decoder.size - 1

    def allocate(self) -> None:
        """All slots are there."""

    def expand(self, images: torch.LongTensor) -> None:
        """See `ImageCache.expand`."""
        self.encoder.expand(images)
        self.decoder.expand(images)
        self.known = self.known[images]
        self.inputs, self.difference = (
            part if part is None else part[images] for part in (self.inputs, self.difference)
        )

    def put(self, images: torch.LongTensor, other: Self) -> None:
        """See `ImageCache.put`."""
        self.encoder.put(images, other.encoder)
        self.decoder.put(images, other.decoder)
        for name in ("known", "inputs", "difference"):
            if getattr(self, name) is not None:
                getattr(self, name).index_copy_(0, images, getattr(other, name))


class LazyRows(NamedTuple):
    """What a lazy pass evaluates, see `arimage.decoding.LazyMAR`.

    Attributes:
        new: int64 [B, M], the places that have become visible since the last pass, N for padding.
        layer: the layer of the decoder whose attention is the last to see all rows.
        count: int64 [B], how many rows are evaluated from there on.
        most: at least the largest of these numbers.
    """

    new: torch.LongTensor
    layer: int
    count: torch.LongTensor
    most: int
