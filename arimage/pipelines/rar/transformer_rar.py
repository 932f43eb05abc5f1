"""The transformer of RAR (https://arxiv.org/abs/2411.00776): tokens in raster order, of which each also reads the
place of the token that it predicts, and blocks that the class and the place modulate."""

from functools import partial
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.step.attention import normed_attention
from ...models.bound import PrefixModel
from ...models.cache import SlotCache
from ...models.conditions import check_raster, rows_of, spread
from ...models.layers import Linear, additive, attend_heads, causal_mask, check_heads, embed_known, init_normal
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.modulated_blocks import launch, modulate
from ...models.step import StepPlaces, begins_step, embed, runs_kernels
from ...settings.schema import Classes, Count, Layers, Share, Side, Width, checked


NORM_EPS = 1e-6
# What comes before the tokens: a learned start, and the class.
PREFIX_LENGTH = 2


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads = config.num_attention_heads
        width = config.hidden_size // self.num_heads
        self.qkv_proj = Linear(config.hidden_size, 3 * config.hidden_size)
        self.query_norm = nn.LayerNorm(width, NORM_EPS)
        self.key_norm = nn.LayerNorm(width, NORM_EPS)
        self.out_proj = Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden, mask, cache=None, layer=0):
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        attended = attend_heads(self.query_norm(query), self.key_norm(key), value, mask, cache, layer)
        return self.dropout(self.out_proj(attended))


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden):
        return self.dropout(self.fc2(F.gelu(self.fc1(hidden))))


class Block(nn.Module):
    """A block that a condition of its own modulates in every place."""

    def __init__(self, config):
        super().__init__()
        self.modulation = Linear(config.hidden_size, 6 * config.hidden_size)
        self.attention_norm = nn.LayerNorm(config.hidden_size, NORM_EPS)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, NORM_EPS)
        self.feed_forward = FeedForward(config)

    def forward(self, hidden, condition, mask=None, cache=None, layer=0):
        """`hidden` and `condition` are [B, T, hidden_size]; `mask` is that of `additive`."""
        shift, scale, gate, feed_shift, feed_scale, feed_gate = self.modulation(condition).chunk(6, dim=-1)
        modulated = torch.addcmul(shift, self.attention_norm(hidden), 1 + scale)
        hidden = torch.addcmul(hidden, gate, self.attention(modulated, mask, cache, layer))
        modulated = torch.addcmul(feed_shift, self.feed_forward_norm(hidden), 1 + feed_scale)
        return torch.addcmul(hidden, feed_gate, self.feed_forward(modulated))

    def step(self, hidden, by: torch.Tensor, at: StepPlaces, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`forward` of the rows `hidden` [R, hidden_size] by the kernels of a step, in five launches. `by` is what
        `modulation` makes of their conditions, [R, 6 * hidden_size]."""
        shift, scale, gate, feed_shift, feed_scale, feed_gate = by.chunk(6, dim=1)
        own, norm, feed, feed_norm = self.attention, self.attention_norm, self.feed_forward, self.feed_forward_norm
        of_norm = {"eps": NORM_EPS, "norm_weight": norm.weight, "norm_bias": norm.bias, "added": 1.0}
        states = launch(own.qkv_proj, hidden, **of_norm, scale=scale, shift=shift)
        states = states.unflatten(1, (3 * own.num_heads, -1))
        cached = keys, values, at.seen, at.prefix_end, at.first, at.slots, at.index, None, at.positions
        query_norm, key_norm = own.query_norm, own.key_norm
        norms = query_norm.weight, key_norm.weight, NORM_EPS, query_norm.bias, key_norm.bias
        attended = normed_attention(states, *cached, *norms, at.visible)
        hidden = launch(own.out_proj, attended, residual=hidden, gate=gate)
        of_norm |= {"norm_weight": feed_norm.weight, "norm_bias": feed_norm.bias}
        inner = launch(feed.fc1, hidden, **of_norm, scale=feed_scale, shift=feed_shift, activation="gelu")
        return launch(feed.fc2, inner, residual=hidden, gate=feed_gate)


class OutputNorm(nn.Module):
    """A norm without weights of its own, modulated in every place."""

    def __init__(self, config):
        super().__init__()
        self.modulation = Linear(config.hidden_size, 2 * config.hidden_size)

    def forward(self, hidden, condition):
        # The other way round than in blocks.
        scale, shift = self.modulation(condition).chunk(2, dim=-1)
        return torch.addcmul(shift, F.layer_norm(hidden, hidden.shape[-1:], eps=NORM_EPS), 1 + scale)


class RARTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """The next-token transformer of RAR, conditioned on a class. The defaults are the published RAR-B.

    A sequence has N + 2 places: a learned start, the class, and the N tokens in raster order. Place 1 + r predicts the
    token of rank r.

    Args:
        grid_size (`int`): tokens along each side of an image.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the shape of the blocks.
        vocab_size (`int`): image tokens.
        num_classes (`int`): number of classes; the label `num_classes` stands for "no class".
        dropout (`float`): of residual branches, in training.

    Raises:
        ValueError: if the heads do not divide the width.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        grid_size: Side = 16,
        hidden_size: Width = 768,
        intermediate_size: Width = 3072,
        num_layers: Layers = 24,
        num_attention_heads: Count = 16,
        vocab_size: Count = 1024,
        num_classes: Classes = 1000,
        dropout: Share = 0.0,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads)
        places = grid_size**2 + PREFIX_LENGTH
        # Embeddings throughout, since offloading brings weights only for the forward pass of their own module.
        self.start_embedding = nn.Embedding(1, hidden_size)
        self.class_embedding = nn.Embedding(num_classes + 1, hidden_size)
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(places, hidden_size)
        # Of the place of the token that is predicted, by its rank.
        self.target_embedding = nn.Embedding(grid_size**2, hidden_size)
        # What modulates the blocks in a place, in addition to the class.
        self.modulation_embedding = nn.Embedding(places, hidden_size)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = OutputNorm(self.config)
        self.head = Linear(hidden_size, vocab_size)

    def init_weights(self) -> None:
        """Initialise for training: N(0, 0.02), modulations that leave every block out, and a head of zeros."""
        init_normal(self)
        for name, weight in self.named_parameters():
            if "modulation." in name or name.endswith("bias"):
                nn.init.zeros_(weight)
        nn.init.zeros_(self.head.weight)

    def prefix_mask(self, class_labels: torch.LongTensor, **_) -> torch.BoolTensor:
        """Which places of the prefix are visible, bool [B, 2]: all."""
        return torch.ones(len(class_labels), PREFIX_LENGTH, dtype=torch.bool, device=class_labels.device)

    def forward(
        self,
        tokens: torch.LongTensor | None = None,
        *,
        ranks: torch.LongTensor | None = None,
        class_labels: torch.LongTensor,
        unconditional: torch.BoolTensor | None = None,
        mask: torch.BoolTensor,
        cache: SlotCache | None = None,
        prefix: bool = False,
        first_query: int = 0,
    ) -> torch.Tensor:
        """One forward pass over the prefix, tokens, or both: logits [B, T - first_query, vocab_size].

        Args:
            tokens: image tokens [B, Q]; -1 is a token that is not known yet.
            ranks: their ranks [B, Q].
            class_labels: int64 [B].
            unconditional: bool [B], which images have "no class" instead of theirs.
            mask: bool [B, T, K], which keys each place sees: those of the T fed places, or the first K of `cache`.
            cache: the keys and values of the T fed places are written to it, see `SlotCache.write_next_at`.
            prefix: whether the prefix comes before `tokens`.
            first_query: leave out the logits of the places before it.
        """
        if unconditional is not None:
            class_labels = torch.where(unconditional, self.config.num_classes, class_labels)
        label = self.class_embedding(class_labels)[:, None]
        parts, places = [], []
        if prefix:
            index = torch.arange(PREFIX_LENGTH, device=class_labels.device).expand(len(class_labels), -1)
            parts += [self.start_embedding(torch.zeros_like(index[:, :1])), label]
            places.append(index)
        if tokens is not None and ranks is not None:
            parts.append(embed_known(self.token_embedding, tokens))
            places.append(ranks + PREFIX_LENGTH)
        hidden, condition = self._in_places(torch.cat(parts, dim=1), label, torch.cat(places, dim=1))
        scores = additive(mask, hidden.dtype)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, condition, scores, cache, layer)
        return self.head(self.norm(hidden[:, first_query:], condition[:, first_query:]))

    def _in_places(
        self, hidden: torch.Tensor, label: torch.Tensor, place: torch.LongTensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings [B, T, hidden_size] in their places [B, T], and what modulates the blocks there."""
        hidden = hidden + self.position_embedding(place)
        # The start and the last token predict nothing.
        target, last = place - 1, self.config.grid_size**2 - 1
        predicts = ((target >= 0) & (target <= last))[..., None]
        hidden = hidden + self.target_embedding(target.clamp(0, last)) * predicts
        return hidden, F.silu(label + self.modulation_embedding(place))

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_kernels`."""
        return list(self.children())

    def step(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        class_labels: torch.LongTensor,
        seen: torch.BoolTensor,
        slots: torch.LongTensor | None = None,
        visible: torch.BoolTensor | None = None,
    ) -> torch.Tensor:
        """`forward` over tokens [B, Q] by the kernels of `arimage.kernels.step`, where `runs_kernels` allows it: the
        logits [rows * Q, vocab_size].

        Args:
            positions, slots, visible: [B, Q, ...], see `TokenModel.forward`. Slots for trees need `visible`.
            cache: has the rows of all branches.
            class_labels: int64 [rows], `num_classes` for "no class".
            seen: bool [rows, P], which places of the prefix a row sees.
        """
        embedded, at = embed(self.token_embedding, tokens, positions, cache, None, seen, slots, visible)
        place = positions.clamp(min=0).repeat(cache.branches, 1) + PREFIX_LENGTH
        label = self.class_embedding(class_labels)[:, None]
        parts = self._in_places(embedded.unflatten(0, place.shape), label, place)
        hidden, condition = (part.flatten(0, 1) for part in parts)
        layers = [part.modulation for part in (*self.blocks, self.norm)]
        *by, last = modulate(condition, layers)
        for layer, (block, each) in enumerate(zip(self.blocks, by, strict=True)):
            hidden = block.step(hidden, each, at, *cache.of_layer(layer))
        scale, shift = last.chunk(2, dim=1)
        norm = {"eps": NORM_EPS, "scale": scale, "shift": shift, "added": 1.0}
        return launch(self.head, hidden, **norm)

    def predict(
        self, tokens: torch.LongTensor, class_labels: torch.LongTensor, unconditional: torch.BoolTensor | None = None
    ) -> torch.Tensor:
        """Teacher-forced logits [B, N, vocab_size] in float32 of tokens [B, N] in raster order: those of rank r see
        the class and the tokens before r. Differentiable, for training."""
        fed = tokens[:, :-1]
        logits = self(
            fed,
            ranks=torch.arange(fed.shape[1], device=fed.device).expand_as(fed),
            class_labels=class_labels,
            unconditional=unconditional,
            mask=causal_mask(self.prefix_mask(class_labels), fed.shape[1]),
            prefix=True,
            first_query=PREFIX_LENGTH - 1,
        )
        return logits.float()


class RARTokenModel(PrefixModel):
    """A `RARTransformer` with the classes of one call, as a `TokenModel` (see `arimage.decoding.contract.models`).

    Args:
        transformer, condition, layout, settings: see `PrefixModel`. The layout is (rows, columns) in raster order.

    Raises:
        ValueError: if the layout has three dimensions, or an order.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"

    def __init__(self, transformer: nn.Module, condition: dict[str, torch.Tensor], layout, **settings):
        check_raster(layout, "RAR")
        super().__init__(transformer, condition, layout, **settings)
        # Of every row, also where rows of one class share a prefix: the class modulates all forward passes.
        values, nobody = self.conditions.values, transformer.config.num_classes
        self._labels = values["class_labels"].masked_fill(values.get("unconditional", torch.tensor(False)), nobody)

    def take(self, images: torch.LongTensor) -> Self:
        """See `TokenModel.take`."""
        other = super().take(images)
        other._labels = self._labels[rows_of(images, self.branches, self.conditions.images)]
        return other

    def put(self, images: torch.LongTensor, other: Self) -> bool:
        """See `TokenModel.put`."""
        rows = rows_of(images, self.branches, self.conditions.images)
        self._labels.index_copy_(0, rows, other._labels)
        return super().put(images, other)

    def prefill(
        self, batch_size: int, scratch: int = 0, *, slots: int | None = None
    ) -> tuple[SlotCache, torch.FloatTensor]:
        """A cache with the prefix in it, and the logits [G, B, V] of position 0; see `TokenModel.prefill`."""
        cache, condition, copies = self.open_prefill(SlotCache, batch_size, slots=slots, scratch=scratch)
        mask = self.write_prefix(cache, condition)
        logits = self.transformer(**condition, mask=mask, cache=cache, prefix=True, first_query=PREFIX_LENGTH - 1)
        [logits] = spread(cache, copies, logits)
        return cache, logits.squeeze(1).unflatten(0, (self.branches, -1))

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.FloatTensor:
        """Logits [G, B, Q, V] of the positions after `positions`; see `TokenModel.forward`."""
        runs = partial(runs_kernels, rows=self.branches * tokens.numel())
        if begins_step(cache, self.transformer, slots=slots, visible=visible, runs=runs):
            given = {"class_labels": self._labels, "seen": self.conditions.seen, "slots": slots, "visible": visible}
            return self.transformer.step(tokens, positions, cache, **given).view(self.branches, *tokens.shape, -1)
        at_slots = cache.slots_of(positions, slots)
        cache.write_slots(at_slots)
        logits = self.transformer(
            tokens.repeat(self.branches, 1),
            # Padding is computed as the first token.
            ranks=positions.clamp(min=0).repeat(self.branches, 1),
            mask=self.conditions.visible_keys(cache.prefix_end, cache.seen(at_slots, visible)),
            cache=cache,
            class_labels=self._labels,
        )
        return logits.unflatten(0, (self.branches, -1))
