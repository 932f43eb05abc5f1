"""What a decoding asks of a model: a Protocol for every kind of model."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol, Self

import torch

from .cache import Cache
from .layout import Layout


Kind = Literal["tokens", "scales", "vectors", "masked_latents", "causal_latents"]
"""What a model generates, and how. Every model says it as its `kind`, and is narrowed by it."""


class TokenModel(Protocol):
    """A model that predicts one token after another, bound to the conditions of the B images (or videos) of one call.

    Tokens are addressed by rank, the order in which they are generated; `layout` knows the place of each rank in the
    image.

    Attributes:
        num_tokens: N tokens per image.
        vocab_size: V tokens, ids 0 .. V - 1.
        layout: the `Layout` of the tokens.
        block: how many consecutive ranks are predicted together, 1 in most models. The distribution of a token is
            given by the tokens before its block, so that those of a block are independent of each other. It divides N.
        device: where its tensors live.
        codebook: the vectors of the tokens in the image tokenizer [V, D], for the decodings that ask which tokens look
            alike; None where they are not known.
        network: the network that runs the forward passes, by which tables and measured times are remembered.
        drafter: a `Drafter` trained for this model; None where there is none.
        denoises: whether it is a `DenoisingModel`.
        predicts_groups: whether it is a `GroupModel`.
        context: int64 [B, rows * columns], the tokens of the frame before the first, where the videos continue others;
            None where there is none.
    """

    kind: ClassVar[Literal["tokens"]]
    predicts_groups: ClassVar[bool]
    num_tokens: int
    layout: Layout
    block: int
    device: torch.device
    codebook: torch.Tensor | None
    network: object
    denoises: bool

    @property
    def vocab_size(self) -> int: ...

    @property
    def drafter(self) -> "Drafter | None": ...

    @property
    def context(self) -> torch.LongTensor | None: ...

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[Cache, torch.FloatTensor]:
        """A cache of N + `scratch` slots with the condition in it, and the logits [G, B, V] of rank 0; where `block`
        is larger than 1, those of the first block, [G, B, block, V].

        G is 1, or 2 under guidance: with the condition, without it. A model whose layout has an order also takes
        `given`, int64 [B, M], the known tokens of the first ranks, -1 behind those of an image: they are in the cache
        too, by the same forward pass, and the logits are those of the rank after them.
        """
        ...

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: Any,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.FloatTensor:
        """Feed `tokens[b, j]` of rank `positions[b, j]`; return the logits [G, B, Q, V] of the ranks `block` after
        them.

        Keys and values go to slot `slots[b, j]`, by default the rank itself; writing again overwrites, so a rejected
        draft needs no rollback. A query sees the slots 0 .. its own, or those of `visible` [B, Q, N + scratch]. A
        position of -1 is
        padding: it is not cached and its logits mean nothing. A token of -1 is not known yet; the model substitutes a
        stand-in.

        Where `block` is larger than 1, whole blocks are fed, in any order, and a query also sees the rest of its own;
        there are no other slots than the ranks, and `visible` is not given.
        """
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same bound to the `images` [M] of its own, in this order."""
        ...

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """Bind `images` [M] to the conditions of `other`, a model of M images of the same network, layout and
        guidance, for
        `forward`: what `prefill` returned to `other` is put into the cache. Returns whether its tensors are other ones
            now."""
        ...


class DenoisingModel(TokenModel, Protocol):
    """A `TokenModel` with a codebook that can also read noise in place of tokens."""

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: Any,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
        vectors: torch.FloatTensor | None = None,
        noise: torch.FloatTensor | None = None,
    ) -> torch.FloatTensor:
        """As `TokenModel.forward`, where a query with `noise` [B, Q] t in (0, 1] reads its `vectors` [B, Q, D] in
        place of its token: a mixture (1 - t) x + t e of the vector x of a token, in the codebook `normalised`, and of
        Gaussian noise e. Logits of queries that see no noise are those of `TokenModel.forward`."""
        ...


class GroupModel(TokenModel, Protocol):
    """A `TokenModel` that can also predict several tokens in one forward pass, each without the others of its
    group."""

    def prefill_group(self, batch_size: int, count: int) -> tuple[Cache, torch.FloatTensor]:
        """A cache of N slots with the condition in it, and the logits [G, B, count, V] of the first `count` ranks."""
        ...

    def forward_group(
        self, tokens: torch.LongTensor, rank: int, count: int, cache: Any, *, causal: bool = False
    ) -> torch.FloatTensor:
        """Feed `tokens` [B, T] of the T ranks from `rank` on, all tokens before which have been fed; return the logits
        [G, B, count, V] of the `count` ranks after them. The fed tokens see each other as in the authors' code, or, if
        `causal`, each sees those before it only, as when one is fed at a time."""
        ...

    def guidance_progress(self, rank: int, count: int) -> torch.FloatTensor:
        """How far guidance that grows linearly has grown when the authors' code samples the group of the `count` ranks
        from `rank` on: [count] from 0, for a scale of 1, to 1, for the full scale."""
        ...


class ScaleModel(Protocol):
    """A next-scale model of K square token maps, from coarse to fine, bound to the conditions of the B images of one
    call.

    Its input for a scale is made from the latents [B, D, P, P] that the maps before add up to, P the side of the last.

    Attributes:
        scales: sides of the K maps.
        num_tokens: N, the tokens of all maps together.
        vocab_size: V tokens, ids 0 .. V - 1.
        device: where its tensors live.
        codebook: the vectors of the tokens in the image tokenizer [V, D], float32.
        network: the network that runs the forward passes.
        refiner: a smaller model of the same maps, bound to the same images, for collaborative decoding; None where
            there is none.
    """

    kind: ClassVar[Literal["scales"]]
    scales: tuple[int, ...]
    num_tokens: int
    vocab_size: int
    device: torch.device
    codebook: torch.FloatTensor
    network: object

    @property
    def refiner(self) -> "ScaleModel | None": ...

    def prefill(self, batch_size: int, latents: Sequence[torch.FloatTensor] = ()) -> tuple[Any, torch.FloatTensor]:
        """Feed the scales 0 .. k in one forward pass, where `latents` holds those after each of the first k scales;
        return a cache with them and the condition in it, and the logits [G, B, n, V] of the n tokens of scale k.

        G is 1, or 2 under guidance: with the condition, without it.
        """
        ...

    def forward(self, scale: int, latents: torch.FloatTensor, cache: Any) -> torch.FloatTensor:
        """Feed `scale`, the next one of the cache, made from the `latents` after the scale before; return its logits
        [G, B, n, V]."""
        ...

    def accumulate(
        self, scale: int, latents: torch.FloatTensor | None, vectors: torch.FloatTensor
    ) -> torch.FloatTensor:
        """The latents after `scale`: those before it (None at the start) plus the vectors [B, n, D] of its map."""
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same bound to the `images` [M] of its own, in this order."""
        ...


class VectorModel(Protocol):
    """A distilled model that turns noise into the vectors of all N tokens in one forward pass, bound to the conditions
    of the B images of one call. Its tokens come in levels: single tokens of a raster model, maps of a next-scale
    model.

    Attributes:
        offsets: how many tokens come before each of the levels, and N as the last.
        num_tokens: N tokens per image.
        vocab_size: V tokens, ids 0 .. V - 1.
        device: where its tensors live.
        codebook: the vectors of the tokens in the image tokenizer [V, D], float32.
        codes_until: the level before which the checkpoint takes codes, and vectors from it on; None where it names
            none.
        noise: what the images are made from, float32 [B, N, D]; None to take it from their seeds.
        network: the network that runs the forward passes.
        teacher: the model that it was distilled from, bound to the same images; None where there is none.
    """

    kind: ClassVar[Literal["vectors"]]
    offsets: Sequence[int]
    num_tokens: int
    vocab_size: int
    device: torch.device
    codebook: torch.FloatTensor
    codes_until: int | None
    noise: torch.FloatTensor | None
    network: object

    @property
    def teacher(self) -> TokenModel | ScaleModel | None: ...

    def predict(self, vectors: torch.FloatTensor, start: int) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """From vectors [B, N, D], those of known tokens before `start` and noise from it on, to the vectors [B, N, D]
        of all tokens and the logits [B, N, V] of their codes; before `start` they mean nothing."""
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same model bound to the conditions of some of the images, by their indices int64 [b]."""
        ...


class LatentModel(Protocol):
    """A model of continuous tokens, bound to the conditions of the B images of one call: vectors [D] that a denoising
    head samples, given the network's conditioning vectors. It is a `MaskedLatentModel` or a `CausalLatentModel`.

    Attributes:
        num_tokens: N tokens per image.
        dim: D, the width of a token.
        layout: the `Layout` of the tokens.
        device: where its tensors live.
        network: the network that runs the forward passes.
    """

    num_tokens: int
    dim: int
    layout: Layout
    device: torch.device
    network: object

    def denoise(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """Mean and standard deviation [B, Q, D] of noisy tokens [B, Q, D] after the denoising step `step`, of which 0
        is the last, by their conditions [G, B, Q, C] and the guidance scales [B, 1 or Q, 1]. All in float32."""
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same bound to the `images` [M] of its own, in this order."""
        ...


class MaskedLatentModel(LatentModel, Protocol):
    """A `LatentModel` whose tokens are generated in any order.

    Attributes:
        drafter: a smaller model of the same tokens, bound to the same images; None where there is none.
    """

    kind: ClassVar[Literal["masked_latents"]]

    @property
    def drafter(self) -> "MaskedLatentModel | None": ...

    def forward(
        self, tokens: torch.FloatTensor, visible: torch.BoolTensor, count: int, *, padded: bool = False
    ) -> torch.Tensor:
        """Conditioning vectors of the denoising head for every token, [G, B, N, C], given the tokens [B, N, D] that
        are `visible` [B, N], at most `count` per image. `padded` says that some images may have fewer.

        G is 1, or 2 under guidance: with the condition, without it.
        """
        ...


class CausalLatentModel(LatentModel, Protocol):
    """A `LatentModel` whose tokens are generated one after the other, with a cache. The standard deviations that
    `denoise` returns are those of the step alone, numbers above 0 that broadcast to [B, Q, D]: neither tokens nor
    conditions change them.

    Attributes:
        drafter: a smaller model of the same tokens and the same standard deviations, bound to the same images; None
            where there is none.
    """

    kind: ClassVar[Literal["causal_latents"]]

    @property
    def drafter(self) -> "CausalLatentModel | None": ...

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[Cache, torch.Tensor]:
        """A cache of N + `scratch` slots with the condition in it, and the conditioning vectors [G, B, C] of the
        denoising head for the token of rank 0."""
        ...

    def forward(self, tokens: torch.FloatTensor, positions: torch.LongTensor, cache: Any) -> torch.Tensor:
        """Feed the token `tokens[b, j]` [D] of rank `positions[b, j]`; return the conditions [G, B, Q, C] of the ranks
        after them. A query sees the slots 0 .. its own. Writing again overwrites, and a position of -1 is padding, as
        in `TokenModel.forward`."""
        ...

    def denoise_paths(
        self,
        paths: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> torch.FloatTensor:
        """The means [B, Q, S, D] of `denoise` after every one of the S steps, for tokens before each of them, `paths`
        [B, Q, S, D], of which [:, :, 0] are those before the last step. One call of the head."""
        ...

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """See `TokenModel.put`."""
        ...


Model = TokenModel | ScaleModel | VectorModel | MaskedLatentModel | CausalLatentModel


class Drafter(Protocol):
    """A small network that continues what a model has computed. A `TokenModel` with a drafter returns its features on
    request: `prefill(..., return_features=True)` and `forward(..., return_features=True)` return one more value, what
        the logits were
    computed from, [G, B, D] of rank 0 and [G, B, Q, D]."""

    def bind(self, model: TokenModel) -> "DraftModel":
        """The drafter for the images that `model` is bound to."""
        ...


class DraftModel(Protocol):
    """A drafter bound to the B images of one call."""

    def open_cache(self, batch_size: int, scratch: int) -> Cache:
        """An empty cache of N + `scratch` slots."""
        ...

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
        """Feed `tokens[b, j]` of rank `positions[b, j]` with the features [G, B, Q, D] that the logits of that rank
        were computed from, the model's or the drafter's own; return the drafter's guess at the logits [G, B, Q, V] and
        the features [G, B, Q, D] of the ranks after. `visible` and `slots` as in `TokenModel.forward`."""
        ...
