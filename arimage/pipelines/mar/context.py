"""What masked transformers keep of a forward pass for later ones."""

from typing import NamedTuple, Self

import torch

from ...models.layer_cache import LayerCache


class MARContext:
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
