"""The interface between decodings and models: a Protocol for every kind of model."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, runtime_checkable

import torch

from .cache import Cache, ImageCache
from .layout import Layout


Kind = Literal["tokens", "masked_tokens", "scales", "vectors", "masked_latents", "causal_latents"]
"""What a model generates, and how. Every model has one as its `kind`, which also narrows its type."""


class BoundModel(Protocol):
    """A model of any kind, bound to the conditions of the B images (or videos) of one call.

    Attributes:
        num_tokens: N tokens per image.
        device: where its tensors live.
        network: the network that runs the forward passes; tables and measured times are stored per network.
        compact: whether `prefill` returns a cache with only the slots that it fills, for images that are `put` into
            another cache; `ImageCache.allocate` allocates the others. The loop sets it.
    """

    num_tokens: int
    device: torch.device
    network: object
    compact: bool = False

    @property
    def put_key(self) -> Hashable:
        """A call may use the memory and the CUDA graphs of an earlier call whose model has an equal key. None: those
        of no other call."""
        ...

    def take(self, images: torch.LongTensor) -> Self:
        """The same model bound to the conditions of `images` [M], in this order."""
        ...

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """Bind `images` [M] to the conditions of `other`, a model of M images with the same network, layout and
        guidance, for later calls of `forward`; the caller puts the cache of `other` into the cache. Returns whether
        tensors of this model were replaced rather than written in place."""
        ...


class TokenModel(BoundModel, Protocol):
    """A model that predicts one token after another. Tokens are addressed by rank, the order in which they are
    generated. Logits have the dtype of the network. A class that has this Protocol as its base defines `num_tokens`,
    `vocab_size`, `layout`, `device`, `network`, `prefill` and `forward`, and has the defaults of the others.

    Attributes:
        vocab_size: V tokens, ids 0 .. V - 1.
        layout: the `Layout` of the tokens. Where it has an order, the model is an `OrderedModel`.
        block: how many consecutive ranks are predicted together, 1 in most models; a divisor of N. A token is
            conditioned on the tokens before its block, so tokens of one block are independent of each other.
        codebook: the vectors of the tokens in the image tokenizer [V, D]; None where they are not known.
        drafter: a `Drafter` trained for this model, which is then a `FeatureModel`, or None.
        neighbours: a `Neighbours` trained for this model, or None.
        denoises: whether it is a `DenoisingModel`.
        predicts_groups: whether it is a `GroupModel`.
        context: int64 [B, rows * columns], the tokens of the frame before the first one, where the videos continue
            given frames; None otherwise.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"
    predicts_groups: ClassVar[bool] = False
    layout: Layout
    block: int = 1
    codebook: torch.Tensor | None = None
    denoises: bool = False

    @property
    def vocab_size(self) -> int: ...

    @property
    def drafter(self) -> "Drafter | None": ...

    @property
    def neighbours(self) -> "Neighbours | None": ...

    @property
    def context(self) -> torch.LongTensor | None: ...

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[Cache, torch.Tensor]:
        """Return a cache of N + `scratch` slots that holds the condition, and the logits [G, B, V] of rank 0; where
        `block` is larger than 1, the logits [G, B, block, V] of the first block. G is 1, or 2 under guidance:
        conditional, then unconditional."""
        ...

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: Any,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        """Feed `tokens[b, j]` of rank `positions[b, j]`; return the logits [G, B, Q, V] of the ranks `block` after
        them.

        Keys and values go to slot `slots[b, j]`, by default the rank itself; writing again overwrites, so a rejected
        draft needs no rollback. A query attends to the slots from 0 to its own, or to those given by `visible` [B, Q,
        N + scratch]. A position of -1 is padding: it is not cached, and its logits are undefined. A token of -1 is not
        known yet; the model substitutes a stand-in. Without `slots`, the Q queries of an image have different ranks
        within Q consecutive ones. Where `block` is larger than 1, whole blocks are fed, in any order, without
        `visible` and scratch slots, and a query also attends to the rest of its own block.
        """
        ...


class RasterModel(TokenModel, Protocol):
    """A `TokenModel` of one grid of single tokens in raster order, whose cache may have fewer slots than the image has
    tokens."""

    def prefill(self, batch_size: int, scratch: int = 0, *, slots: int | None = None) -> tuple[Cache, torch.Tensor]:
        """As `TokenModel.prefill`, with `slots` slots in place of N: whole rows. `forward` is then called with slots,
        each in the column of its token, and with `visible`."""
        ...


class OrderedModel(TokenModel, Protocol):
    """A `TokenModel` whose layout has an order."""

    def prefill(
        self, batch_size: int, scratch: int = 0, given: torch.LongTensor | None = None
    ) -> tuple[Cache, torch.Tensor]:
        """As `TokenModel.prefill`, but the same forward pass writes the given tokens of the first ranks to the cache,
        `given` [B, M], padded with -1; the logits are those of the rank after them."""
        ...


class FeatureModel(TokenModel, Protocol):
    """A `TokenModel` with a drafter. With `return_features`, its methods return one more value, the features that the
    logits were computed from: [G, B, D] and [G, B, Q, D]."""

    def prefill(self, batch_size: int, scratch: int = 0, *, return_features: bool = False) -> Any: ...

    def forward(
        self, tokens: torch.LongTensor, positions: torch.LongTensor, cache: Any, *, return_features=False, **options
    ) -> Any: ...


class DenoisingModel(TokenModel, Protocol):
    """A `TokenModel` with a codebook that can also read noise in place of tokens."""

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: Any,
        *,
        vectors: torch.FloatTensor | None = None,
        noise: torch.FloatTensor | None = None,
        **options,
    ) -> torch.Tensor:
        """As `TokenModel.forward`, but a query whose `noise` t [B, Q] is in (0, 1] reads in place of its token its
        `vectors` [B, Q, D], (1 - t) x + t e with the vector x of a token in the `normalised` codebook and Gaussian
        noise e. The logits of queries that attend to no noise are those of `TokenModel.forward`."""
        ...


class GroupModel(TokenModel, Protocol):
    """A `TokenModel` that can also predict a group of tokens in one forward pass, independently of each other."""

    def prefill_group(self, batch_size: int, count: int, scratch: int = 0) -> tuple[Cache, torch.Tensor]:
        """Return a cache of N + `scratch` slots that holds the condition, and the logits [G, B, count, V] of the first
        `count` ranks."""
        ...

    def forward_group(
        self, tokens: torch.LongTensor, rank: int, count: int, cache: Any, *, causal: bool = False
    ) -> torch.Tensor:
        """Feed `tokens` [B, T] of the T ranks from `rank` on, after all earlier ones; return the logits
        [G, B, count, V] of the `count` ranks after them. The fed tokens attend to each other as in the authors' code,
        or, if `causal`, each to earlier ones only."""
        ...

    def guidance_progress(self, rank: int, count: int) -> torch.FloatTensor:
        """The progress [count] of the authors' linear guidance schedule for the `count` ranks from `rank` on, from 0
        (a scale of 1) to 1 (the full scale)."""
        ...


@dataclass(frozen=True)
class ConfidenceSettings:
    """The settings of `ConfidenceDecoding` that a model was published with; its attributes are explained there. With
    `gumbel`, a token is sampled by a number for each token of the vocabulary, not by one. Both are exact."""

    steps: int
    schedule: str
    noise: float
    noise_schedule: str
    guidance_schedule: str
    gumbel: bool = False


class MaskedTokenModel(BoundModel, Protocol):
    """A model of tokens that are decided in any order, a set of them in each forward pass. Every token attends to all
    others, decided or not. Each of its layers has R rows: the N places of the image in raster order, then rows that
    stand for something else, such as a text.

    Attributes:
        vocab_size: V tokens, ids 0 .. V - 1.
        layout: the `Layout` of the tokens, one grid in raster order.
        num_rows: R.
        published: how `ConfidenceDecoding` decides its tokens by default.
    """

    kind: ClassVar[Literal["masked_tokens"]]
    published: ConfidenceSettings
    layout: Layout
    vocab_size: int
    num_rows: int

    def open_context(self, batch_size: int, *, logits: bool = False) -> Any:
        """An empty context of so many images, an `ImageCache`, for the keys and values of every layer and row; with
        `logits` also for the logits of the rows, as `logits` [G, B, R, V], or [G, B, N, V] for places only."""
        ...

    def forward(
        self,
        tokens: torch.LongTensor,
        places: torch.LongTensor,
        *,
        rows: torch.LongTensor | None = None,
        context: Any = None,
    ) -> torch.Tensor:
        """The logits [G, B, Q, V] at `places` [B, Q], given the tokens [B, N], -1 where they are not decided. A place
        of N is padding, whose logits are undefined. G is 1, or 2 under guidance: conditional, then unconditional.

        Without `rows` all rows are evaluated, and a `context` keeps what they computed. Of `rows` [B, M] or
        [G, B, M], padded with R, only these are evaluated, attend to all rows of the context, and replace what it kept
        of them. `places` are among the rows, unless the context keeps logits, which are then those of other places.
        """
        ...


class ScaleModel(BoundModel, Protocol):
    """A next-scale model of K token maps, from coarse to fine. Its input for a scale is made from latents
    [B, D, *shape], the sum of all maps before it. A bit of a model that predicts bits is a token of a vocabulary of 2;
    a cell of a map then has several tokens.

    Attributes:
        scales: the shape of each of the K maps in cells, (rows, columns) or (frames, rows, columns).
        last_clip: the first scale of the last clip of a film, whose maps add up by themselves; 0 for images.
        scale_sizes: the number of tokens of each map.
        costs: how much the forward pass of each scale costs, in any unit.
        num_tokens: the tokens of all maps together.
        vocab_size: V tokens, ids 0 .. V - 1.
        guidance_schedule: what a single guidance scale s means at scale k: "linear" is 1 + (s - 1) k / (K - 1),
            "constant" is s.
        codebook: the vectors of the tokens in the image tokenizer [V, D], float32; None for a model that predicts
            bits.
        refiner: a smaller model of the same maps, bound to the same images, or None.
        prunes: whether `prefill` takes `pruned`.
    """

    kind: ClassVar[Literal["scales"]]
    prunes: ClassVar[bool]
    guidance_schedule: ClassVar[Literal["linear", "constant"]]
    scales: tuple[tuple[int, ...], ...]
    last_clip: int
    scale_sizes: tuple[int, ...]
    vocab_size: int

    @property
    def costs(self) -> tuple[float, ...]: ...

    @property
    def codebook(self) -> torch.FloatTensor | None: ...

    @property
    def refiner(self) -> "ScaleModel | None": ...

    def prefill(
        self, batch_size: int, latents: Sequence[torch.FloatTensor] = (), *, pruned: Mapping[int, float] | None = None
    ) -> tuple[ImageCache, torch.FloatTensor]:
        """Feed the scales 0 .. k in one forward pass, where `latents` holds the latents after each of the first k
        scales; return a cache that holds the condition and these scales, and the logits [G, B, n, V] of the n tokens
        of scale k. G is 1, or 2 under guidance: conditional, then unconditional.

        A model that `prunes` also takes `pruned`: for some consecutive scales of the last clip, from the third of all
        and the second of the clip on, the share of cells, 0 <= share < 1, that later calls of `forward` do not feed.
        The hidden states of such a cell change as those at its place in the last scale of which all cells are fed.
        """
        ...

    def forward(self, scale: int, latents: torch.FloatTensor, cache: Any, *, guided: bool = True) -> torch.FloatTensor:
        """Feed `scale`, the next one in the cache, given the `latents` after the previous scale; return its logits
        [G, B, n, V]. Without `guided` only the conditional branch is fed, and no later scale can be guided."""
        ...

    def guide(
        self,
        logits: torch.FloatTensor,
        guidance_scale: float | torch.FloatTensor,
        temperature: float | torch.FloatTensor,
    ) -> torch.FloatTensor | None:
        """The logits [1, B, n, V] after guidance and temperature, one number each or one per lane [B], of the `logits`
        [2, B, n, V] of a scale, in a model with guidance of its own. None leaves both to `Sampling`."""
        ...

    def vectors(self, scale: int, tokens: torch.LongTensor) -> torch.FloatTensor:
        """The map [B, D, *shape] of the vectors of the tokens [B, n] of `scale`."""
        ...

    def accumulate(self, scale: int, latents: torch.FloatTensor | None, added: torch.FloatTensor) -> torch.FloatTensor:
        """The latents after `scale`: the latents before it (None at the start) plus its map of vectors `added`
        [B, D, *shape]."""
        ...


class VectorModel(BoundModel, Protocol):
    """A distilled model that turns noise into the vectors of all N tokens in one forward pass. Its tokens come in
    levels: single tokens if its teacher is a raster model, maps if it is a next-scale model.

    Attributes:
        offsets: how many tokens come before each level, followed by N.
        vocab_size: V tokens, ids 0 .. V - 1.
        layout: the `Layout` of the tokens; None for maps.
        codebook: the vectors of the tokens in the image tokenizer [V, D], float32.
        codes_until: the checkpoint was tuned to use codes before this level and vectors from it on; may be None.
        noise: the noise that the images are generated from, float32 [B, N, D]; None derives it from their seeds.
        teacher: the model that it was distilled from, bound to the same images, or None.
    """

    kind: ClassVar[Literal["vectors"]]
    offsets: Sequence[int]
    vocab_size: int
    layout: Layout | None
    codebook: torch.FloatTensor
    codes_until: int | None
    noise: torch.FloatTensor | None

    @property
    def teacher(self) -> TokenModel | ScaleModel | None: ...

    def predict(self, vectors: torch.FloatTensor, start: int) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """Return the vectors [B, N, D] of all tokens and the logits [B, N, V] of their codes, given the `vectors`
        [B, N, D] of the tokens before `start`, and noise from it on. The outputs before `start` are undefined."""
        ...


class LatentModel(BoundModel, Protocol):
    """A model of continuous tokens. A token is a vector [D] that a denoising head samples, given a conditioning vector
    from the network. It is a `MaskedLatentModel` or a `CausalLatentModel`.

    Attributes:
        dim: D, the width of a token.
        layout: the `Layout` of the tokens.
    """

    dim: int
    layout: Layout

    def denoise(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """Mean and standard deviation [B, Q, D] of the tokens [B, Q, D] after the denoising step `step` (0 is the
        last), given their conditions [G, B, Q, C] and guidance scales [B, 1 or Q, 1]. All in float32."""
        ...


class MaskedLatentModel(LatentModel, Protocol):
    """A `LatentModel` whose tokens are generated in any order.

    Attributes:
        num_rows: how many rows each of its layers has: those of the tokens, and those that stand for the condition.
        num_layers: the layers of the part that evaluates all rows.
        drafter: a smaller model of the same tokens, bound to the same images, or None.
    """

    kind: ClassVar[Literal["masked_latents"]]
    num_rows: int
    num_layers: int

    @property
    def drafter(self) -> "MaskedLatentModel | None": ...

    def open_context(self, batch_size: int, *, lazy: bool = False) -> ImageCache:
        """An empty context of so many images for `forward_places`, or for `forward_lazily`."""
        ...

    def forward(
        self,
        tokens: torch.FloatTensor,
        visible: torch.BoolTensor,
        count: int,
        *,
        padded: bool = False,
        context: Any = None,
    ) -> torch.Tensor:
        """Conditioning vectors [G, B, N, C] of the denoising head for every token, given the `visible` [B, N] ones of
        the tokens [B, N, D], `count` per image, or, if `padded`, at most so many. A `context` keeps what passes over a
        part of the places need. G is 1, or 2 under guidance: conditional, then unconditional."""
        ...

    def forward_places(
        self,
        tokens: torch.FloatTensor,
        visible: torch.BoolTensor,
        count: int,
        places: torch.LongTensor,
        known: int,
        context: Any,
        *,
        padded: bool = False,
        keep_buffers: bool = False,
    ) -> torch.Tensor:
        """As `forward`, but evaluates only `places` [B, Q], padded with N, and returns their conditioning vectors
        [G, B, Q, C]. All other places, and with `keep_buffers` the inputs that stand for the condition, are as the
        last `forward` with this `context` left them. Visible places come first, at most `known` per image: those that
        have become visible since."""
        ...

    def forward_lazily(
        self,
        tokens: torch.FloatTensor,
        visible: torch.BoolTensor,
        count: int,
        new: torch.LongTensor,
        places: torch.LongTensor,
        context: Any,
        *,
        layer: int,
        rows: torch.LongTensor,
        most: int,
        padded: bool = False,
    ) -> torch.Tensor:
        """The conditioning vectors [G, B, Q, C] of the invisible `places` [B, Q], as LazyMAR computes them
        (https://arxiv.org/abs/2503.12450). Under guidance only the conditional branch is evaluated, and the other one
        is as far from it as in the last `forward` with this `context`. Places are padded with N.

        Of the visible tokens only those at `new` [B, M] are encoded, which have become visible since the last pass
        with this context. The layers up to `layer` attend from all rows, later ones evaluate only `rows` [B], at most
        `most`: those of `new` and `places`, and those whose values in this layer are least like the last ones, by the
        mean cosine over heads. The keys and values of all others stay.
        """
        ...

    def denoise_lazily(
        self,
        step: int,
        tokens: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
        kept: dict,
        *,
        whole: bool,
        fresh: bool,
    ) -> tuple[torch.FloatTensor, torch.FloatTensor]:
        """As `denoise`, but only `whole` steps evaluate all of the head. Others evaluate the conditional branch, with
        what its inner layers changed and, unless `fresh`, its outer ones computed in the last whole step. `kept`,
        empty before the first step, holds these."""
        ...


class CausalLatentModel(LatentModel, Protocol):
    """A `LatentModel` whose tokens are generated one after the other, with a cache. The standard deviations that
    `denoise` returns depend on the step alone, not on tokens or conditions. They broadcast to [B, Q, D].

    Attributes:
        noisy: whether all of these standard deviations are above 0.
        drafter: a smaller model of the same tokens and standard deviations, bound to the same images, or None.
    """

    kind: ClassVar[Literal["causal_latents"]]

    @property
    def noisy(self) -> bool: ...

    @property
    def drafter(self) -> "CausalLatentModel | None": ...

    def prefill(self, batch_size: int, scratch: int = 0) -> tuple[Cache, torch.Tensor]:
        """Return a cache of N + `scratch` slots that holds the condition, and the conditioning vectors [G, B, C] of
        the denoising head for the token of rank 0."""
        ...

    def forward(self, tokens: torch.FloatTensor, positions: torch.LongTensor, cache: Any) -> torch.Tensor:
        """As `TokenModel.forward`, for the token `tokens[b, j]` [D] of rank `positions[b, j]`: the conditions
        [G, B, Q, C] of the ranks after them."""
        ...

    def denoise_paths(
        self,
        paths: torch.FloatTensor,
        conditions: torch.Tensor,
        guidance: torch.FloatTensor,
        num_diffusion_steps: int | tuple[int, ...],
    ) -> torch.FloatTensor:
        """The means [B, Q, S, D] of `denoise` after each of the S steps, given the tokens before each step, `paths`
        [B, Q, S, D]; index 0 along S is the last step. One call of the head."""
        ...


Model = TokenModel | MaskedTokenModel | ScaleModel | VectorModel | MaskedLatentModel | CausalLatentModel


class Neighbours(Protocol):
    """What a model's logits of a token owe to the tokens next to it, whatever else it is conditioned on.

    Attributes:
        offsets: where the K tokens [B, Q, K] are, as in `Layout.neighbours`.
        reads_features: whether it reads those [B, Q, D] of the model, which is then a `FeatureModel`, guided as logits
            are.
    """

    offsets: Sequence[tuple[int, ...]]
    reads_features: bool

    def change(self, now: torch.LongTensor, before: torch.LongTensor, features: Any = None) -> torch.FloatTensor:
        """About how much the guided logits [B, Q, V] change if the tokens, -1 is none, are `now` and were `before`."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A small network that predicts further tokens from the features of a `FeatureModel`."""

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
    ) -> tuple[torch.Tensor, torch.FloatTensor]:
        """As `TokenModel.forward`, with the features [G, B, Q, D] that the logits of the fed ranks were computed from,
        by the model or by the drafter; return logits [G, B, Q, V] and features [G, B, Q, D] of the ranks after
        them."""
        ...
