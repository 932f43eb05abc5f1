"""What a decoding asks of a model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeGuard

import torch

from .layout import Layout


if TYPE_CHECKING:
    from .distribution import Sampling
    from .state import DecodingState


class TokenModel(Protocol):
    """A model that predicts one token after another, bound to the conditions of the B images (or videos) of one call.

    Tokens are addressed by rank, the order in which they are generated; `layout` knows the place of each rank in the image.

    Attributes:
        num_tokens: N tokens per image.
        vocab_size: V tokens, ids 0 .. V - 1.
        layout: the `Layout` of the tokens.
        block: how many consecutive ranks are predicted together, 1 in most models. The distribution of a token is given by the
            tokens before its block, so that those of a block are independent of each other. It divides N.
        device: where its tensors live.
        codebook: the vectors of the tokens in the image tokenizer [V, D], for the decodings that ask which tokens look alike;
            None where they are not known.
        network: the network that runs the forward passes, by which tables and measured times are remembered.
        drafter: a `Drafter` trained for this model; None where there is none.
        denoises: whether it is a `DenoisingModel`.
        context: int64 [B, rows * columns], the tokens of the frame before the first, where the videos continue others; None where
            there is none.
    """

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

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[Any, torch.FloatTensor]:
        """A cache of N + `scratch` slots with the condition in it, and the logits [G, B, V] of rank 0; where `block` is larger
        than 1, those of the first block, [G, B, block, V].

        G is 1, or 2 under guidance: with the condition, without it. A model whose layout has an order also takes `given`, int64
        [B, M], the known tokens of the first ranks, -1 behind those of an image: they are in the cache too, by the same forward
        pass, and the logits are those of the rank after them.
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
        """Feed `tokens[b, j]` of rank `positions[b, j]`; return the logits [G, B, Q, V] of the ranks `block` after them.

        Keys and values go to slot `slots[b, j]`, by default the rank itself; writing again overwrites, so a rejected draft
        needs no rollback. A query sees the slots 0 .. its own, or those of `visible` [B, Q, N + scratch]. A position of -1 is
        padding: it is not cached and its logits mean nothing. A token of -1 is not known yet; the model substitutes a
        stand-in.

        Where `block` is larger than 1, whole blocks are fed, in any order, and a query also sees the rest of its own; there
        are no other slots than the ranks, and `visible` is not given.
        """
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same bound to the `images` [M] of its own, in this order."""
        ...

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """Bind `images` [M] to the conditions of `other`, a model of M images of the same network, layout and guidance, for
        `forward`: what `prefill` returned to `other` is put into the cache. Returns whether its tensors are other ones now."""
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
        """As `TokenModel.forward`, where a query with `noise` [B, Q] t in (0, 1] reads its `vectors` [B, Q, D] in place of its token:
        a mixture (1 - t) x + t e of the vector x of a token, in the codebook `normalised`, and of Gaussian noise e. Logits of queries
        that see no noise are those of `TokenModel.forward`."""
        ...


class GroupModel(TokenModel, Protocol):
    """A `TokenModel` that can also predict several tokens in one forward pass, each without the others of its group."""

    def prefill_group(self, batch_size: int, count: int) -> tuple[Any, torch.FloatTensor]:
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
        """How far guidance that grows linearly has grown when the authors' code samples the group of the `count` ranks from
        `rank` on: [count] from 0, for a scale of 1, to 1, for the full scale."""
        ...


class ScaleModel(Protocol):
    """A next-scale model of K square token maps, from coarse to fine, bound to the conditions of the B images of one call.

    Its input for a scale is made from the latents [B, D, P, P] that the maps before add up to, P the side of the last.

    Attributes:
        scales: sides of the K maps.
        num_tokens: N, the tokens of all maps together.
        vocab_size: V tokens, ids 0 .. V - 1.
        device: where its tensors live.
        codebook: the vectors of the tokens in the image tokenizer [V, D], float32.
        network: the network that runs the forward passes.
        refiner: a smaller model of the same maps, bound to the same images, for collaborative decoding; None where there is
            none.
    """

    scales: tuple[int, ...]
    num_tokens: int
    vocab_size: int
    device: torch.device
    codebook: torch.FloatTensor
    network: object

    @property
    def refiner(self) -> "ScaleModel | None": ...

    def prefill(self, batch_size: int, latents: Sequence[torch.FloatTensor] = ()) -> tuple[Any, torch.FloatTensor]:
        """Feed the scales 0 .. k in one forward pass, where `latents` holds those after each of the first k scales; return a
        cache with them and the condition in it, and the logits [G, B, n, V] of the n tokens of scale k.

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
    """A distilled model that turns noise into the vectors of all N tokens in one forward pass, bound to the conditions of the B
    images of one call. Its tokens come in levels: single tokens of a raster model, maps of a next-scale model.

    Attributes:
        offsets: how many tokens come before each of the levels, and N as the last.
        num_tokens: N tokens per image.
        vocab_size: V tokens, ids 0 .. V - 1.
        device: where its tensors live.
        codebook: the vectors of the tokens in the image tokenizer [V, D], float32.
        codes_until: the level before which the checkpoint takes codes, and vectors from it on; None where it names none.
        noise: what the images are made from, float32 [B, N, D]; None to take it from their seeds.
        network: the network that runs the forward passes.
        teacher: the model that it was distilled from, bound to the same images; None where there is none.
    """

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
        """From vectors [B, N, D], those of known tokens before `start` and noise from it on, to the vectors [B, N, D] of all
        tokens and the logits [B, N, V] of their codes; before `start` they mean nothing."""
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same model bound to the conditions of some of the images, by their indices int64 [b]."""
        ...


class LatentModel(Protocol):
    """A model of continuous tokens, bound to the conditions of the B images of one call: vectors [D] that a denoising head
    samples, given what the network says of them. It is a `MaskedLatentModel` or a `CausalLatentModel`.

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
        """Mean and standard deviation [B, Q, D] of noisy tokens [B, Q, D] after the denoising step `step`, of which 0 is the last,
        by their conditions [G, B, Q, C] and the guidance scales [B, 1 or Q, 1]. All in float32."""
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same bound to the `images` [M] of its own, in this order."""
        ...


class MaskedLatentModel(LatentModel, Protocol):
    """A `LatentModel` whose tokens are generated in any order.

    Attributes:
        drafter: a smaller model of the same tokens, bound to the same images; None where there is none.
    """

    @property
    def drafter(self) -> "MaskedLatentModel | None": ...

    def forward(
        self, tokens: torch.FloatTensor, visible: torch.BoolTensor, count: int, *, padded: bool = False
    ) -> torch.Tensor:
        """What the denoising head is told of every token, conditions [G, B, N, C], by the tokens [B, N, D] that are `visible`
        [B, N], at most `count` per image. `padded` says that some images may have fewer.

        G is 1, or 2 under guidance: with the condition, without it.
        """
        ...


class CausalLatentModel(LatentModel, Protocol):
    """A `LatentModel` whose tokens are generated one after the other, with a cache. The standard deviations that `denoise` returns
    are those of the step alone, numbers above 0 that broadcast to [B, Q, D]: neither tokens nor conditions change them.

    Attributes:
        drafter: a smaller model of the same tokens and the same standard deviations, bound to the same images; None where there
            is none.
    """

    @property
    def drafter(self) -> "CausalLatentModel | None": ...

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[Any, torch.Tensor]:
        """A cache of N + `scratch` slots with the condition in it, and what the denoising head is told of the token of rank 0,
        conditions [G, B, C]."""
        ...

    def forward(self, tokens: torch.FloatTensor, positions: torch.LongTensor, cache: Any) -> torch.Tensor:
        """Feed the token `tokens[b, j]` [D] of rank `positions[b, j]`; return the conditions [G, B, Q, C] of the ranks after
        them. A query sees the slots 0 .. its own. Writing again overwrites, and a position of -1 is padding, as in
        `TokenModel.forward`."""
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


Model = TokenModel | ScaleModel | VectorModel | LatentModel
_VECTORS = "it generates vectors from noise: use few-step"


class Drafter(Protocol):
    """A small network that continues what a model has computed. A `TokenModel` with a drafter returns its features on request:
    `prefill(..., return_features=True)` and `forward(..., return_features=True)` return one more value, what the logits were
    computed from, [G, B, D] of rank 0 and [G, B, Q, D]."""

    def bind(self, model: TokenModel) -> "DraftModel":
        """The drafter for the images that `model` is bound to."""
        ...


class DraftModel(Protocol):
    """A drafter bound to the B images of one call."""

    def open_cache(self, batch_size: int, scratch: int) -> Any:
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
        """Feed `tokens[b, j]` of rank `positions[b, j]` with the features [G, B, Q, D] that the logits of that rank were
        computed from, the model's or the drafter's own; return the drafter's guess at the logits [G, B, Q, V] and the features
        [G, B, Q, D] of the ranks after. `visible` and `slots` as in `TokenModel.forward`."""
        ...


class Decoding(Protocol):
    """A decoding method: a frozen dataclass of its settings. It may take one kind of model only, and takes its own states.

    Attributes:
        exact: whether its samples follow the model's own distribution.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def exact(self) -> bool: ...

    def supports(self, model: Any) -> str | None:
        """None, or the reason why this decoding cannot run on `model`, a `TokenModel`, `ScaleModel`, `VectorModel` or
        `LatentModel`."""
        ...

    def start(self, model: Any, sampling: "Sampling", seeds: torch.LongTensor) -> "DecodingState":
        """Prefill and decide what the prefill decides, for a model that it supports; `seeds` is int64 [B]. All shapes are fixed
        here."""
        ...

    def step(self, state: Any) -> None:
        """One forward pass of the model; `state` is updated in place and nothing is read on the host."""


def generates_scales(model: Model) -> TypeGuard[ScaleModel]:
    """Whether `model` is a `ScaleModel`."""
    return hasattr(model, "scales")


def generates_vectors(model: Model) -> TypeGuard[VectorModel]:
    """Whether `model` is a `VectorModel`."""
    return hasattr(model, "offsets")


def generates_latents(model: Model) -> TypeGuard[LatentModel]:
    """Whether `model` is a `LatentModel`."""
    return hasattr(model, "denoise")


def generates_latents_in_turn(model: Model) -> TypeGuard[CausalLatentModel]:
    """Whether `model` is a `CausalLatentModel`."""
    return generates_latents(model) and hasattr(model, "prefill")


def generates_tokens(model: Model) -> TypeGuard[TokenModel]:
    """Whether `model` is a `TokenModel`."""
    return not generates_scales(model) and not generates_vectors(model) and not generates_latents(model)


def needs_tokens(model: Model, blocks: bool = False) -> str | None:
    """Why a decoding that generates token by token, or with `blocks` also block by block, cannot run on `model`, or None."""
    if generates_scales(model):
        return "it generates whole scales: use next-scale or code"
    if generates_latents(model):
        names = "ar, sjd-coupled or path-jacobi" if generates_latents_in_turn(model) else "mar"
        return f"its tokens are continuous: use {names}"
    if not generates_tokens(model):
        return _VECTORS
    return (
        None if blocks or model.block == 1 else "it predicts whole blocks of tokens: use ar, sjd-coupled or the like"
    )


def needs_scales(model: Model) -> str | None:
    """Why a decoding that generates whole scales cannot run on `model`, or None."""
    if generates_scales(model):
        return None
    return needs_tokens(model) or "it generates token by token: use ar, sjd-coupled or the like"


def needs_masked_latents(model: Model) -> str | None:
    """Why a decoding that generates sets of continuous tokens cannot run on `model`, or None."""
    if generates_latents(model) and not generates_latents_in_turn(model):
        return None
    return needs_tokens(model) or needs_scales(model)


def needs_latents_in_turn(model: Model) -> str | None:
    """Why a decoding that generates one continuous token after the other cannot run on `model`, or None."""
    return None if generates_latents_in_turn(model) else needs_tokens(model) or needs_scales(model)


def needs_groups(model: Model) -> str | None:
    """Why a decoding that generates groups of tokens cannot run on `model`, or None."""
    if not generates_tokens(model) or model.block > 1:
        return needs_tokens(model)
    return (
        None
        if hasattr(model, "forward_group")
        else "it predicts one token after the other: use sjd-coupled or the like"
    )


def needs_vectors(model: Model) -> str | None:
    """Why a decoding that turns noise into vectors cannot run on `model`, or None."""
    return None if generates_vectors(model) else needs_tokens(model) or needs_scales(model)


def needs_raster(model: Model) -> str | None:
    """Why a decoding that works row by row cannot run on `model`, or None."""
    if not generates_tokens(model) or model.block > 1:
        return needs_tokens(model)
    return None if model.layout.order is None else "its tokens are not in raster order"
