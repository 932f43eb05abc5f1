"""The transformer of ARPG (https://arxiv.org/abs/2503.10568): a causal half reads the known tokens in any order, and
in the other half queries for any places attend to its outputs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.rotary import rotate
from ...kernels.step.qkv import qkv
from ...models.bound import PrefixModel
from ...models.cache import SlotCache
from ...models.conditions import check_image
from ...models.layers import (
    FeedForward,
    Linear,
    RMSNorm,
    additive,
    attend,
    check_heads,
    embed_known,
    heads_per_key,
    init_normal,
)
from ...models.llama_blocks import Block, ClassOrTextCondition, rotary_table
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.step import StepPlaces, begins_step, embed, product
from ...models.step_layer import attend_layer, feed_layer, layer_of
from ...settings.schema import Classes, Count, Epsilon, Flag, Layers, Positive, Share, Side, Width, checked


class QueryBlock(nn.Module):
    """A block of the second half: queries attend to keys and values that all its blocks share, not to each other."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.q_proj = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.out_proj = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, config.dropout)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden, key, value, rotary, mask):
        query = self.q_proj(self.attention_norm(hidden)).unflatten(-1, (-1, self.head_dim))
        query = rotate(query, rotary).transpose(1, 2)
        attended = self.out_proj(attend(query, key, value, mask).transpose(1, 2).flatten(2))
        hidden = hidden + (self.dropout(attended) if self.training else attended)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))

    def step(self, hidden: torch.Tensor, at: StepPlaces, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`forward` by the kernels of a step; see `Block.step`."""
        layer = layer_of(self, self.q_proj)
        return feed_layer(attend_layer(hidden, layer, at, keys, values, writes=False), layer)


class ARPGTransformer(TransformerMixin, ModelMixin, ConfigMixin, ClassOrTextCondition):
    """The any-order transformer of ARPG, conditioned on a class, as published, or on text. The defaults are the
    published ARPG-L.

    Args:
        conditioning (`str`): "class" or "text".
        grid_size (`int`): tokens along each side of the images that the weights were trained on.
        hidden_size, intermediate_size, num_attention_heads (`int`): the shape of a block. The width of a head must be
            a multiple of 4.
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` for grouped-query attention, in both
            halves.
        num_layers (`int`): blocks of both halves together, an even number.
        vocab_size (`int`): image tokens.
        num_classes (`int`): number of classes; one more embedding stands for "no class".
        num_condition_tokens (`int`): length of the prefix: 1 for classes and for models that read only the state of
            the last text token.
        caption_dim (`int`): width of the text embeddings.
        dropout (`float`): of embeddings and residual branches, in training.
        place_embeddings (`bool`): whether queries start with an embedding of their place. Without it, as published,
            all places get the same first logits, since queries see only the condition. That is enough for a class, but
            not for a caption that says what is where.
        condition_copies (`int`): how often the prefix repeats the last token of the condition, 1 as published. Each
            copy has an embedding of its own added.
        reads_words (`bool`): whether attention can choose among the tokens of a text. Without it, as published, they
            have zero keys and attention averages them, which does not tell "a cat and a dog" from "a dog and a cat".
            With it they have keys, and embeddings of their places in the text.

    Raises:
        ValueError: if heads or layers do not fit each other, or `reads_words` is given for classes.
    """

    _no_split_modules = ["Block", "QueryBlock"]
    _repeated_blocks = ["Block", "QueryBlock"]

    @register_to_config
    @checked
    def __init__(
        self,
        conditioning: Literal["class", "text"] = "class",
        grid_size: Side = 16,
        hidden_size: Width = 1024,
        intermediate_size: Width = 2816,
        num_layers: Layers = 24,
        num_attention_heads: Count = 16,
        num_key_value_heads: Count | None = None,
        vocab_size: Count = 16384,
        num_classes: Classes = 1000,
        num_condition_tokens: Count = 1,
        caption_dim: Width = 2048,
        rope_theta: Positive = 10000.0,
        norm_eps: Epsilon = 1e-5,
        dropout: Share = 0.0,
        place_embeddings: Flag = False,
        condition_copies: Count = 1,
        reads_words: Flag = False,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads, 4)
        if num_layers % 2:
            raise ValueError(f"num_layers is {num_layers}: give an even number, half of it for each half")
        if reads_words and conditioning == "class":
            raise ValueError("reads_words is true, and a class has no words: leave it out")
        self.add_condition()
        self.word_embedding = nn.Embedding(num_condition_tokens, hidden_size) if reads_words else None
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.query_embedding = nn.Parameter(torch.empty(hidden_size).normal_(std=0.02))
        self.place_embedding = nn.Embedding(grid_size**2, hidden_size) if place_embeddings else None
        self.copy_embedding = nn.Embedding(condition_copies, hidden_size) if condition_copies > 1 else None
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers // 2))
        self.memory_norm = RMSNorm(hidden_size, norm_eps)
        keys = (num_key_value_heads or num_attention_heads) * hidden_size // num_attention_heads
        self.memory_proj = Linear(hidden_size, 2 * keys, bias=False)
        self.query_blocks = nn.ModuleList(QueryBlock(self.config) for _ in range(num_layers // 2))
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False)

    def init_weights(self) -> None:
        """Initialise for training: N(0, 0.02), and a head of zeros."""
        init_normal(self)
        nn.init.normal_(self.query_embedding, std=0.02)
        nn.init.zeros_(self.head.weight)

    def embed_condition(self, **condition) -> torch.Tensor:
        """See `ClassOrTextCondition.embed_condition`. The copies of the last token follow each other."""
        embedded = super().embed_condition(**condition)
        if self.word_embedding is not None:
            places = condition["prompt_attention_mask"].long().cumsum(1) - 1
            embedded = embedded + self.word_embedding(places.clamp(min=0))
        if self.copy_embedding is None:
            return embedded
        # A look-up, not the weight itself, which offloading brings only for the forward pass of its module.
        copies = torch.arange(self.config.condition_copies, device=embedded.device)
        return torch.cat([embedded[:, :-1], embedded[:, -1:] + self.copy_embedding(copies)], dim=1)

    def prefix_mask(self, **condition) -> torch.BoolTensor:
        mask = super().prefix_mask(**condition)
        return torch.cat([mask[:, :-1], mask[:, -1:].expand(-1, self.config.condition_copies)], dim=1)

    def forward(
        self,
        tokens: torch.LongTensor | None = None,
        *,
        rotary: torch.Tensor,
        mask: torch.BoolTensor,
        query_rotary: torch.Tensor,
        query_places: torch.LongTensor,
        query_mask: torch.BoolTensor,
        query_rows: torch.LongTensor | None = None,
        condition: dict[str, torch.Tensor] | None = None,
        cache: SlotCache | None = None,
    ) -> torch.Tensor:
        """One forward pass over a prefix, tokens, or both, and over queries. Returns the logits of the queries
        [R, Q, vocab_size] in float32, where R is B unless `query_rows` is given.

        Args:
            tokens: image tokens [B, T]; -1 is a token that is not known yet.
            rotary: rows of `rotary_table` for the fed positions, [B or 1, P + T, head_dim / 2, 2].
            mask: bool [B, P + T, K], which keys each fed position sees: those of the fed positions, or the first K of
                `cache`.
            query_rotary: rows of `rotary_table` for the queried places, [R or 1, Q, head_dim / 2, 2].
            query_places: the queried places, [R or 1, Q].
            query_mask: bool [R, Q, K], which keys each query sees.
            query_rows: the index of the row among B that the queries of each row attend to, [R].
            condition: arguments of `embed_condition`; the prefix comes before `tokens`.
            cache: the keys and values of the fed positions are written to it, see `SlotCache.write_next_at`.
        """
        parts = [] if condition is None else [self.embed_condition(**condition)]
        if tokens is not None:
            parts.append(embed_known(self.token_embedding, tokens))
        hidden = self.embedding_dropout(torch.cat(parts, dim=1))
        scores = additive(mask, hidden.dtype, heads_per_key(self.config))
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, rotary, scores, cache, layer)
        memory = self.memory_proj(self.memory_norm(hidden)).unflatten(-1, (-1, self.head_dim))
        key, value = memory.chunk(2, dim=2)
        key, value = rotate(key, rotary).transpose(1, 2), value.transpose(1, 2)
        if cache is not None:
            key, value = cache.write(len(self.blocks), key, value)
        if query_rows is not None:
            key, value = key[query_rows], value[query_rows]
        queries = self.query_embedding.expand(*query_mask.shape[:2], -1)
        if self.place_embedding is not None:
            queries = queries + self.place_embedding(query_places)
        if query_mask is not mask:
            scores = additive(query_mask, hidden.dtype, heads_per_key(self.config))
        for block in self.query_blocks:
            queries = block(queries, key, value, query_rotary, scores)
        return self.head(self.norm(queries))

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_step`."""
        places = [] if self.place_embedding is None else [self.place_embedding]
        first = [self.token_embedding, *self.blocks, self.memory_norm, self.memory_proj]
        return [*first, *places, *self.query_blocks, self.norm, self.head]

    def step(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        table: torch.FloatTensor,
        seen: torch.BoolTensor,
        places: torch.LongTensor,
        query_places: torch.LongTensor,
        slots: torch.LongTensor | None = None,
        visible: torch.BoolTensor | None = None,
        sees: torch.LongTensor | None = None,
        query_sees: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        """`forward` over tokens [B, T] and queries by the kernels of `arimage.kernels.step`, where `runs_step`
        allows it: the logits [rows * Q, vocab_size] of the queries.

        Args:
            positions, slots, visible: [B, T, ...], see `TokenModel.forward`. Slots for trees need `visible`, with
                which there is one query for each token, which sees the same.
            cache, table, seen: see `LlamaGenTransformer.step`.
            places, query_places: of the tokens and the queries in the image, [B, T] and [B, Q].
            sees, query_sees: up to which slot tokens and queries see, [B, T] and [B, Q]; None for that of each token.
        """
        hidden, at = embed(self.token_embedding, tokens, positions, cache, table, seen, slots, visible, places)
        asked = at.slots if query_sees is None else query_sees.flatten()
        if sees is not None:
            at = replace(at, slots=sees.flatten())
        for layer, block in enumerate(self.blocks):
            hidden = block.step(hidden, at, *cache.of_layer(layer))
        memory, norm, layer = cache.of_layer(len(self.blocks)), self.memory_norm, self.memory_proj
        scales, turns = [] if layer.scale is None else [layer.scale], (at.table, at.positions, self.head_dim)
        qkv(hidden, norm.weight, norm.eps, [layer.weight], *turns, *memory, at.index, scales, [])
        queries = self.query_embedding.expand(cache.branches * query_places.numel(), -1)
        if self.place_embedding is None:
            queries = queries.contiguous()
        else:
            queries = queries + self.place_embedding(query_places.flatten()).repeat(cache.branches, 1)
        at = replace(at, positions=query_places.flatten(), slots=asked)
        for block in self.query_blocks:
            queries = block.step(queries, at, *memory)
        return product(self.head, queries, self.norm)

    def predict(
        self,
        tokens: torch.LongTensor,
        *,
        order: torch.LongTensor | None = None,
        first_places: torch.LongTensor | None = None,
        **condition,
    ) -> torch.Tensor:
        """Teacher-forced logits [B, N, vocab_size] in float32, by rank, of tokens [B, N] in raster order on the
        trained grid. Rank r lies at place `order[b, r]` (None: raster order) and sees the condition (arguments of
        `embed_condition`) and the tokens of the ranks before it. An order [B, K] of fewer places gives the logits
        [B, K, vocab_size] of its ranks. The logits of `first_places` [B, F] follow, each as if its place were the
        first, which sees the condition alone: [B, N + F, vocab_size]. Differentiable, for training."""
        if order is not None:
            tokens = tokens.gather(1, order)
        prefix_mask = self.prefix_mask(**condition)
        start = prefix_mask.shape[1]
        table, mask = self.teacher_forcing(prefix_mask, tokens.shape[1] - 1)
        places = torch.arange(len(table) - start, device=table.device)[None] if order is None else order
        rotary, queries = table[start:][places], mask[:, start - 1 :]
        if first_places is not None:
            places = torch.cat([places.expand(len(first_places), -1), first_places], dim=1)
            queries = torch.cat([queries, queries[:, :1].expand(-1, first_places.shape[1], -1)], dim=1)
        return self(
            tokens[:, :-1],
            rotary=torch.cat([table[None, :start].expand(len(rotary), -1, -1, -1), rotary[:, :-1]], dim=1),
            mask=mask,
            query_rotary=table[start:][places],
            query_places=places,
            query_mask=queries,
            condition=condition,
        ).float()


class ARPGTokenModel(PrefixModel):
    """An `ARPGTransformer` with the conditions and the orders of one call, as a `GroupModel` (see
    `arimage.decoding.contract.models`).

    Args:
        transformer, condition, layout, settings: see `PrefixModel`. The layout is (rows, columns) in any order.

    Raises:
        ValueError: if the layout has three dimensions.
    """

    kind: ClassVar[Literal["tokens"]] = "tokens"
    predicts_groups = True

    def __init__(self, transformer: nn.Module, condition: dict[str, torch.Tensor], layout, **settings):
        check_image(layout, "ARPG")
        super().__init__(transformer, condition, layout, **settings)
        config, length = transformer.config, self.conditions.prefix_length
        self._rotary = rotary_table(
            transformer.head_dim, layout.shape, length, config.rope_theta, self.device, config.reads_words
        )

    def _per_row(self, ranks: torch.LongTensor) -> torch.Tensor:
        """The rotations [rows, Q, head_dim / 2, 2] of ranks [B, Q]."""
        return self._rotary[self.conditions.prefix_length :][self.layout.places(ranks)].repeat(self.branches, 1, 1, 1)

    def _ask(self, ranks: torch.LongTensor) -> dict[str, torch.Tensor]:
        """The transformer's arguments for queries of ranks [B, Q]."""
        places = self.layout.places(ranks).repeat(self.branches, 1)
        return {"query_rotary": self._per_row(ranks), "query_places": places}

    def _open(
        self, batch_size: int, scratch: int, shared: bool = True, filled: int = 0
    ) -> tuple[SlotCache, dict[str, torch.Tensor], Sequence[int]]:
        """See `open_prefill`."""
        options = {"layers": self.transformer.config.num_layers // 2 + 1, "filled": filled, "shared": shared}
        return self.open_prefill(SlotCache, batch_size, scratch=scratch, **options)

    def prefill(
        self, batch_size: int, scratch: int = 0, given: torch.LongTensor | None = None
    ) -> tuple[SlotCache, torch.Tensor]:
        """A cache with the condition and the tokens `given`, and the logits [G, B, V] of the rank after them;
        see `TokenModel.prefill`."""
        if given is None:
            cache, logits = self.prefill_group(batch_size, 1, scratch)
            return cache, logits[:, :, 0]
        # Images of one prompt have given tokens of their own.
        cache, condition, rows = self._open(batch_size, scratch, shared=False, filled=given.shape[1])
        length = self.conditions.prefix_length
        prefix_seen, prefix_at = self.write_prefix(cache, condition), torch.arange(length, device=self.device)
        ranks = torch.arange(given.shape[1], device=self.device).expand_as(given)
        slots, after = torch.where(given < 0, -1, ranks), (given >= 0).sum(1, keepdim=True)
        at = cache.slots_of(slots, None)
        first = (prefix_at + cache.prefix_end - length).expand(len(rows), -1)
        cache.write_next_at(torch.cat([first, cache.index(at)], dim=1))
        # The query sees all given tokens, the last of which is the rank before it, or only the condition.
        seen = cache.seen(torch.cat([at, after - 1], dim=1), None)
        seen = self.conditions.visible_keys(cache.prefix_end, seen)
        logits = self.transformer(
            given.repeat(self.branches, 1),
            rotary=torch.cat([self._rotary[None, :length].expand(len(rows), -1, -1, -1), self._per_row(ranks)], dim=1),
            mask=torch.cat([F.pad(prefix_seen, (0, seen.shape[-1] - cache.prefix_end)), seen[:, :-1]], dim=1),
            **self._ask(after),
            query_mask=seen[:, -1:],
            condition=condition,
            cache=cache,
        )
        return cache, logits.squeeze(1).unflatten(0, (self.branches, -1))

    def prefill_group(self, batch_size: int, count: int, scratch: int = 0) -> tuple[SlotCache, torch.Tensor]:
        """See `GroupModel.prefill_group`."""
        cache, condition, copies = self._open(batch_size, scratch)
        mask, rows = self.write_prefix(cache, condition), torch.tensor(copies, device=self.device)
        logits = self.transformer(
            rotary=self._rotary[None, : self.conditions.prefix_length],
            mask=mask,
            **self._ask(torch.arange(count, device=self.device).expand(batch_size, -1)),
            query_mask=mask[rows, -1:].expand(-1, count, -1),
            query_rows=rows,
            condition=condition,
            cache=cache,
        )
        if len(mask) < len(rows):
            cache.take_rows(rows)
        return cache, logits.unflatten(0, (self.branches, -1))

    def forward(
        self,
        tokens: torch.LongTensor,
        positions: torch.LongTensor,
        cache: SlotCache,
        *,
        visible: torch.BoolTensor | None = None,
        slots: torch.LongTensor | None = None,
    ) -> torch.Tensor:
        """Logits [G, B, Q, V] of the ranks after `positions`; see `TokenModel.forward`."""
        # Padding reads rank 0, and the last rank asks for itself.
        ranks = positions.clamp(min=0)
        asked = (ranks + 1).clamp(max=self.num_tokens - 1)
        if begins_step(cache, self.transformer, slots=slots, visible=visible):
            return self._step(tokens, positions, ranks, asked, cache, slots=slots, visible=visible)
        at_slots = cache.slots_of(positions, slots)
        cache.write_slots(at_slots)
        seen = cache.seen(at_slots, visible)
        return self._run(tokens, ranks, seen, asked, seen, cache)

    def forward_group(
        self, tokens: torch.LongTensor, rank: int, count: int, cache: SlotCache, *, causal: bool = False
    ) -> torch.Tensor:
        """See `GroupModel.forward_group`."""
        ranks = (rank + torch.arange(tokens.shape[1] + count, device=self.device)).expand(len(tokens), -1)
        fed, asked = ranks.split([tokens.shape[1], count], dim=1)
        if begins_step(cache, self.transformer):
            last = fed[:, -1:]
            sees = {"sees": None if causal else last.expand_as(fed), "query_sees": last.expand_as(asked)}
            return self._step(tokens, fed, fed, asked, cache, **sees)
        cache.write_slots(fed)
        query_seen = cache.seen(fed[:, -1:].expand(-1, count), None)
        seen = cache.seen(fed if causal else fed[:, -1:].expand_as(fed), None)
        return self._run(tokens, fed, seen, asked, query_seen, cache)

    def guidance_progress(self, rank: int, count: int) -> torch.FloatTensor:
        """See `GroupModel.guidance_progress`. The authors count the group itself."""
        return torch.full((count,), (rank + count) / self.num_tokens, device=self.device, dtype=torch.float32)

    def _step(self, tokens, positions, ranks, asked, cache, **options) -> torch.Tensor:
        """Feed `tokens` [B, T] of `ranks` to the step of the transformer, with its `options`; return the logits of the
        ranks `asked` [B, Q]."""
        logits = self.transformer.step(
            tokens,
            positions,
            cache,
            table=self._rotary[self.conditions.prefix_length :],
            seen=self.conditions.seen,
            places=self.layout.places(ranks),
            query_places=self.layout.places(asked),
            **options,
        )
        return logits.view(self.branches, *asked.shape, -1)

    def _run(self, tokens, ranks, seen, asked, query_seen, cache) -> torch.Tensor:
        """Feed `tokens` [B, T] of `ranks` that see the keys `seen` [B, T, K]; return the logits of the ranks `asked`
        [B, Q]."""
        mask = self.conditions.visible_keys(cache.prefix_end, seen)
        same = query_seen is seen
        logits = self.transformer(
            tokens.repeat(self.branches, 1),
            rotary=self._per_row(ranks),
            mask=mask,
            **self._ask(asked),
            query_mask=mask if same else self.conditions.visible_keys(cache.prefix_end, query_seen),
            cache=cache,
        )
        return logits.unflatten(0, (self.branches, -1))
