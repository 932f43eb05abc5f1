"""The transformer of LPD (https://arxiv.org/abs/2507.01957): tokens at any places, and queries for other places that
see each other."""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...models.cache import SlotCache
from ...models.layers import Linear, additive, attend_heads, check_heads, embed_known
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.paired import PairedModel, teacher_forcing_mask
from ...settings.schema import Classes, Count, Epsilon, Layers, Share, Side, Width, checked


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = Linear(hidden_size, 3 * hidden_size)
        self.out_proj = Linear(hidden_size, hidden_size)

    def forward(self, hidden, mask, cache=None, layer=0):
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return self.out_proj(attend_heads(query, key, value, mask, cache, layer))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.attention = Attention(width, config.num_attention_heads)
        self.feed_forward_norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.fc1 = Linear(width, config.intermediate_size)
        self.fc2 = Linear(config.intermediate_size, width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden, mask, cache=None, layer=0):
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden), mask, cache, layer))
        return hidden + self.dropout(self.fc2(F.gelu(self.fc1(self.feed_forward_norm(hidden)))))


class LPDTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """The any-order transformer of LPD, conditioned on a class. The defaults are the published LPD-L.

    Args:
        grid_size (`int`): tokens along each side of the images that the weights were trained on.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the shape of the blocks.
        vocab_size (`int`): image tokens.
        num_classes (`int`): number of classes.
        dropout (`float`): of residual branches, in training.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        grid_size: Side = 16,
        hidden_size: Width = 1024,
        intermediate_size: Width = 4096,
        num_layers: Layers = 24,
        num_attention_heads: Count = 16,
        vocab_size: Count = 16384,
        num_classes: Classes = 1000,
        norm_eps: Epsilon = 1e-6,
        dropout: Share = 0.0,
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads)
        self.class_embedding = nn.Embedding(num_classes, hidden_size)
        self.no_class_embedding = nn.Parameter(torch.zeros(hidden_size))
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.query_embedding = nn.Parameter(torch.zeros(hidden_size))
        # One for the condition, then one per place.
        self.position_embedding = nn.Parameter(torch.zeros(1 + grid_size**2, hidden_size))
        self.embedding_norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size, eps=norm_eps)
        self.head = Linear(hidden_size, vocab_size, bias=False)

    def embed_condition(
        self, class_labels: torch.LongTensor, unconditional: torch.BoolTensor | None = None
    ) -> torch.Tensor:
        """Prefix embeddings [B, 1, hidden_size] of `class_labels` [B], or of no class where `unconditional` [B] is
        True."""
        embedded = self.class_embedding(class_labels)
        if unconditional is not None:
            embedded = torch.where(unconditional[:, None], self.no_class_embedding, embedded)
        return embedded[:, None]

    def prefix_mask(self, class_labels: torch.LongTensor, **_) -> torch.BoolTensor:
        """Which prefix positions are visible [B, 1]: all."""
        return torch.ones_like(class_labels, dtype=torch.bool)[:, None]

    def forward(
        self,
        tokens: torch.LongTensor | None = None,
        *,
        at: torch.LongTensor | None = None,
        query_at: torch.LongTensor,
        mask: torch.BoolTensor,
        condition: dict[str, torch.Tensor] | None = None,
        cache: SlotCache | None = None,
    ) -> torch.Tensor:
        """One forward pass over a prefix, tokens, or both, and over queries. Returns the logits of the queries
        [B, Q, vocab_size] in float32.

        Args:
            tokens: image tokens [B, T] at the places `at` [B, T]; -1 is a token that is not known yet.
            query_at: the queried places [B, Q].
            mask: bool [B, P + T + Q, K], which keys each fed position sees: those of the fed positions, or the first K
                of `cache`.
            condition: arguments of `embed_condition`; the prefix comes first.
            cache: the keys and values of the fed positions are written to it, see `SlotCache.write_next_at`.
        """
        parts = []
        if condition is not None:
            parts.append(self.embed_condition(**condition) + self.position_embedding[0])
        if tokens is not None and at is not None:
            parts.append(embed_known(self.token_embedding, tokens) + self.position_embedding[1:][at])
        parts.append(self.query_embedding + self.position_embedding[1:][query_at])
        hidden = self.embedding_norm(torch.cat(parts, dim=1))
        scores = additive(mask, hidden.dtype)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, scores, cache, layer)
        return self.head(self.norm(hidden[:, -query_at.shape[1] :]))

    def predict(
        self,
        tokens: torch.LongTensor,
        *,
        order: torch.LongTensor | None = None,
        group_sizes: list[int] | None = None,
        **condition,
    ) -> torch.Tensor:
        """Teacher-forced logits [B, N, vocab_size] in float32, by rank, of tokens [B, N] in raster order on the
        trained grid. Rank r lies at place `order[b, r]` (None: raster order) and sees the condition (arguments of
        `embed_condition`) and the tokens of the groups before its own. Groups have one token each, or `group_sizes`.
        Differentiable, for training."""
        batch, count = tokens.shape
        at = torch.arange(count, device=tokens.device).expand(batch, -1) if order is None else order
        mask = teacher_forcing_mask(group_sizes or [1] * count, False, tokens.device)
        return self(
            tokens.gather(1, at)[:, :-1],
            at=at[:, :-1],
            query_at=at,
            mask=mask.expand(batch, -1, -1),
            condition=condition,
        ).float()


class LPDTokenModel(PairedModel):
    """An `LPDTransformer` with the conditions and the orders of one call, as a `GroupModel` (see
    `arimage.decoding.contract.models`)."""

    keeps_queries = False

    def encode(self, ranks: torch.LongTensor) -> torch.LongTensor:
        return self.layout.places(ranks)

    def guidance_progress(self, rank: int, count: int) -> torch.FloatTensor:
        """See `GroupModel.guidance_progress`. The authors count the ranks before."""
        return (rank + torch.arange(count, device=self.device, dtype=torch.float32)) / self.num_tokens
