"""What a decoding asks of a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .layout import Layout


if TYPE_CHECKING:
    from .distribution import Sampling
    from .state import DecodingState


class TokenModel(Protocol):
    """A next-token model of the tokens of images, bound to the conditions of the B images of one call.

    Attributes:
        num_tokens: N = rows * columns codes an image.
        vocab_size: V codes, ids 0 .. V - 1.
        layout: the `Layout` of the tokens.
        device: where its tensors live.
        codebook: the codes' vectors in the image tokenizer [V, D], for the decodings that ask which codes look alike; None
            where they are not known.
        network: the network whose passes these are, by which measured times are remembered.
    """

    num_tokens: int
    vocab_size: int
    layout: Layout
    device: torch.device
    codebook: torch.Tensor | None
    network: object

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[Any, torch.FloatTensor]:
        """A cache of N + `scratch` slots with the condition in it, and the logits [G, B, V] of position 0.

        G is 1, or 2 under guidance: with the condition, without it.
        """

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: Any,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.FloatTensor:
        """Feed code `tokens[b, j]` at image position `positions[b, j]`; return the logits [G, B, Q, V] of the positions after.

        Keys and values go to slot `slots[b, j]`, by default the position itself; writing again overwrites, so a rejected
        draft needs no rollback. A query sees the slots 0 .. its own, or those of `visible` [B, Q, N + scratch]. A position
        of -1 is padding: nothing is kept of it and its logits mean nothing. A token of -1 is a code not known yet, which
        the model stands in for.
        """


class ScaleModel(Protocol):
    """A next-scale model of K square maps of codes, from coarse to fine, bound to the conditions of the B images of one call.

    What it is fed for a scale is made from the latents [B, D, P, P] that the maps before add up to, P the side of the last.

    Attributes:
        scales: sides of the K maps.
        num_tokens: N, the codes of all maps together.
        vocab_size: V codes, ids 0 .. V - 1.
        device: where its tensors live.
        codebook: the codes' vectors in the image tokenizer [V, D], float32.
        network: the network whose passes these are.
        refiner: a smaller model of the same maps, bound to the same images, for collaborative decoding; None where there is
            none.
    """

    scales: tuple[int, ...]
    num_tokens: int
    vocab_size: int
    device: torch.device
    codebook: torch.FloatTensor
    network: object
    refiner: "ScaleModel | None"

    def prefill(self, batch_size: int, latents: Sequence[torch.FloatTensor] = ()) -> tuple[Any, torch.FloatTensor]:
        """Feed the scales 0 .. k in one pass, where `latents` holds those after each of the first k scales; return a cache with
        them and the condition in it, and the logits [G, B, n, V] of the n codes of scale k.

        G is 1, or 2 under guidance: with the condition, without it.
        """

    def forward(self, scale: int, latents: torch.FloatTensor, cache: Any) -> torch.FloatTensor:
        """Feed `scale`, the next one of the cache, made from the `latents` after the scale before; return its logits
        [G, B, n, V]."""

    def accumulate(
        self, scale: int, latents: torch.FloatTensor | None, vectors: torch.FloatTensor
    ) -> torch.FloatTensor:
        """The latents after `scale`: those before it, None = nothing yet, with the vectors [B, n, D] of its map added."""


class Drafter(Protocol):
    """A small network that continues what a model has computed. A `TokenModel` that has one offers it as its attribute
    `drafter`, and its features on request: `prefill(..., return_features=True)` and `forward(..., return_features=True)`
    return as one more value what the logits were made from, [G, B, D] of position 0 and [G, B, Q, D]."""

    def bind(self, model: TokenModel) -> "DraftModel":
        """The drafter for the images that `model` is bound to."""


class DraftModel(Protocol):
    """A drafter bound to the B images of one call."""

    def open_cache(self, batch_size: int, scratch: int) -> Any:
        """An empty cache of N + `scratch` slots."""

    def forward(
        self,
        tokens: torch.LongTensor,
        features: torch.FloatTensor,
        positions: torch.LongTensor,
        cache: Any,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """Feed code `tokens[b, j]` at image position `positions[b, j]` with the features [G, B, Q, D] that the logits of that
        position were made from, the model's or the drafter's own; return the drafter's guess at the logits [G, B, Q, V] and
        the features [G, B, Q, D] of the positions after. `visible` and `slots` as in `TokenModel.forward`."""


class Decoding(Protocol):
    """A decoding method: a frozen dataclass of its settings.

    Attributes:
        exact: whether its samples follow the model's own sampling law.
    """

    exact: bool

    def start(self, model: TokenModel | ScaleModel, sampling: "Sampling", seeds: torch.LongTensor) -> "DecodingState":
        """Prefill and decide what the prefill decides; `seeds` is int64 [B]."""

    def step(self, state: "DecodingState") -> "DecodingState":
        """One forward pass of the model."""
