"""The transformer of RandAR (https://arxiv.org/abs/2412.01827): LlamaGen's, with a token that names the place before
each image token."""

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.rotary import rotate
from ...models.cache import SlotCache
from ...models.layers import Linear, RMSNorm, additive, check_heads, embed_known, heads_per_key
from ...models.llama_blocks import Block, ClassOrTextCondition, rotary_table
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.original_names import LLAMAGEN_NAMES
from ...models.paired import PairedModel, teacher_forcing_mask
from ...models.step import StepPlaces, begins_step, product
from ...settings.schema import Classes, Count, Epsilon, Layers, Positive, Share, Side, Width, checked


class RandARTransformer(TransformerMixin, ModelMixin, ConfigMixin, ClassOrTextCondition):
    """The any-order transformer of RandAR, conditioned on a class. The defaults are the published RandAR-L.

    Args:
        grid_size (`int`): tokens along each side of the images that the weights were trained on.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the Llama decoder's shape. The width
            of a head must be a multiple of 4.
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` for grouped-query attention.
        vocab_size (`int`): image tokens.
        num_classes (`int`): number of classes; one more embedding stands for "no class".
        dropout (`float`): of embeddings and residual branches, in training.
    """

    original_names = LLAMAGEN_NAMES

    @register_to_config
    @checked
    def __init__(
        self,
        grid_size: Side = 16,
        hidden_size: Width = 1024,
        intermediate_size: Width = 2816,
        num_layers: Layers = 24,
        num_attention_heads: Count = 16,
        num_key_value_heads: Count | None = None,
        vocab_size: Count = 16384,
        num_classes: Classes = 1000,
        rope_theta: Positive = 10000.0,
        norm_eps: Epsilon = 1e-5,
        dropout: Share = 0.0,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads, 4)
        self.add_condition()
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.query_embedding = nn.Parameter(torch.empty(hidden_size).normal_(std=0.02))
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = RMSNorm(hidden_size, norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False)

    @property
    def reads_text(self) -> bool:
        return False

    def forward(
        self,
        tokens: torch.LongTensor | None = None,
        *,
        at: torch.Tensor | None = None,
        query_at: torch.Tensor,
        mask: torch.BoolTensor,
        condition: dict[str, torch.Tensor] | None = None,
        cache: SlotCache | None = None,
    ) -> torch.Tensor:
        """One forward pass over a prefix, tokens, or both, and over queries. Returns the logits of the queries
        [B, Q, vocab_size] in float32.

        Args:
            tokens: image tokens [B, T]; -1 is a token that is not known yet.
            at: rows of `rotary_table` for the places of the tokens, [B, T, head_dim / 2, 2].
            query_at: rows of `rotary_table` for the queried places, [B, Q, head_dim / 2, 2].
            mask: bool [B, P + T + Q, K], which keys each fed position sees: those of the fed positions, or the first K
                of `cache`.
            condition: arguments of `embed_condition`; the prefix comes first.
            cache: the keys and values of the fed positions are written to it, see `SlotCache.write_next_at`.
        """
        parts, rotary = [], []
        if condition is not None:
            parts.append(self.embed_condition(**condition))
            # The condition has zero queries and keys.
            rotary.append(torch.zeros_like(query_at[:, :1]))
        if tokens is not None and at is not None:
            parts.append(embed_known(self.token_embedding, tokens))
            rotary.append(at)
        parts.append(self._queries(query_at))
        hidden = self.embedding_dropout(torch.cat(parts, dim=1))
        rotary = torch.cat([*rotary, query_at], dim=1)
        scores = additive(mask, hidden.dtype, heads_per_key(self.config))
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, rotary, scores, cache, layer)
        return self.head(self.norm(hidden[:, -query_at.shape[1] :]))

    @property
    def step_parts(self) -> list[nn.Module]:
        """See `runs_step`."""
        return [self.token_embedding, *self.blocks, self.norm, self.head]

    def step(
        self, tokens: torch.LongTensor, cache: SlotCache, at: StepPlaces, *, query_at: torch.FloatTensor
    ) -> torch.Tensor:
        """`forward` over tokens [rows, T] and queries by the kernels of `arimage.kernels.step`, where `runs_step`
        allows it: the logits [rows * Q, vocab_size] of the queries. `query_at` is that of `forward`."""
        embedded = embed_known(self.token_embedding, tokens)
        hidden = torch.cat([embedded, self._queries(query_at)], dim=1).flatten(0, 1)
        for layer, block in enumerate(self.blocks):
            hidden = block.step(hidden, at, *cache.of_layer(layer))
        asked = hidden.unflatten(0, (len(tokens), -1))[:, tokens.shape[1] :].flatten(0, 1)
        return product(self.head, asked, self.norm)

    def _queries(self, query_at: torch.FloatTensor) -> torch.Tensor:
        """The queries [B, Q, hidden_size] for places whose rotations are `query_at`."""
        query = self.query_embedding.unflatten(0, (-1, self.head_dim)).expand(*query_at.shape[:2], -1, -1)
        return rotate(query, query_at).flatten(2)

    def predict(self, tokens: torch.LongTensor, *, order: torch.LongTensor | None = None, **condition) -> torch.Tensor:
        """Teacher-forced logits [B, N, vocab_size] in float32, by rank, of tokens [B, N] in raster order on the
        trained grid. Rank r lies at place `order[b, r]` (None: raster order) and sees the condition (arguments of
        `embed_condition`) and the tokens of the ranks before it. Differentiable, for training."""
        batch, count = tokens.shape
        places = torch.arange(count, device=tokens.device).expand(batch, -1) if order is None else order
        grid = (self.config.grid_size,) * 2
        rotary = rotary_table(self.head_dim, grid, 0, self.config.rope_theta, tokens.device)[places]
        return self(
            tokens.gather(1, places)[:, :-1],
            at=rotary[:, :-1],
            query_at=rotary,
            mask=teacher_forcing_mask([1] * count, True, tokens.device).expand(batch, -1, -1),
            condition=condition,
        ).float()


class RandARTokenModel(PairedModel):
    """A `RandARTransformer` with the conditions and the orders of one call, as a `GroupModel` (see
    `arimage.decoding.contract.models`). As in the authors' code, each fed token of a group sees only those before
    it."""

    keeps_queries = True

    def __init__(self, transformer: nn.Module, condition: dict[str, torch.Tensor], layout, **settings):
        super().__init__(transformer, condition, layout, **settings)
        theta = transformer.config.rope_theta
        self._rotary = rotary_table(transformer.head_dim, layout.shape, 0, theta, self.device)

    def encode(self, ranks: torch.LongTensor) -> torch.Tensor:
        return self._rotary[self.layout.places(ranks)]

    def _run(self, tokens, ranks, asked, places, seen, cache) -> torch.Tensor:
        if not begins_step(cache, self.transformer):
            return super()._run(tokens, ranks, asked, places, seen, cache)
        turned = self.layout.places(torch.cat([ranks, asked], dim=1))
        at = StepPlaces.of(cache, self._rotary, self.conditions.seen, turned, places, visible=seen)
        query_at = self._per_row(self.encode(asked))
        logits = self.transformer.step(self._per_row(tokens), cache, at, query_at=query_at)
        return logits.view(self.branches, *asked.shape, -1)

    def guidance_progress(self, rank: int, count: int) -> torch.FloatTensor:
        """See `GroupModel.guidance_progress`. The authors count the groups before."""
        return torch.full((count,), rank / self.num_tokens, device=self.device, dtype=torch.float32)
