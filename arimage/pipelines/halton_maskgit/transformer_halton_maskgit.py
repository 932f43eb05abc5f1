"""The transformer of Halton-MaskGIT (https://arxiv.org/abs/2503.17076): every pass sees the whole picture, the places
that are not decided yet as masks."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.linear import linear
from ...models.bound import BoundNetwork
from ...models.conditions import Conditions, check_raster, with_unconditional
from ...models.layer_cache import MaskedContext
from ...models.layers import FeedForward, Linear, additive, attend_heads, init_normal
from ...models.mixin import ModelMixin, TransformerMixin
from ...settings.schema import Classes, Count, Epsilon, Layers, Share, Side, Whole, Width, checked


class TokenEmbedding(nn.Module):
    """The embeddings of tokens and, last, of the mask. The same weights turn hidden states into logits.

    One module, since offloading brings the weights of a module only for its own forward pass.
    """

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocab_size + 1, hidden_size) * 0.02)
        self.bias = nn.Parameter(torch.zeros(vocab_size))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The embeddings of tokens [...], or the logits [..., V] of hidden states [..., hidden_size]."""
        if rows.is_floating_point():
            return linear(rows, self.weight[:-1], self.bias)
        return F.embedding(rows, self.weight)


class Attention(nn.Module):
    """Attention whose queries and keys are normalised over all heads together. The heads need not fill the width of
    the hidden states."""

    def __init__(self, config):
        super().__init__()
        self.num_heads, self.eps = config.num_attention_heads, config.norm_eps
        inner = config.hidden_size // self.num_heads * self.num_heads
        self.qkv_proj = Linear(config.hidden_size, 3 * inner, bias=False)
        self.out_proj = Linear(inner, config.hidden_size, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden, mask, cache=None, layer=0):
        qkv = self.qkv_proj(hidden).unflatten(-1, (3, -1))
        query, key = F.rms_norm(qkv[:, :, :2], qkv.shape[-1:], eps=self.eps).unbind(2)
        query, key, value = (rows.unflatten(-1, (self.num_heads, -1)) for rows in (query, key, qkv[:, :, 2]))
        hidden = self.out_proj(attend_heads(query, key, value, mask, cache, layer))
        return self.dropout(hidden) if self.training else hidden


class Block(nn.Module):
    """A block that its condition modulates."""

    def __init__(self, config):
        super().__init__()
        self.modulation = Linear(config.hidden_size, 6 * config.hidden_size)
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, config.dropout)

    def forward(self, hidden, condition, mask=None, cache=None, layer=0):
        """`hidden` is [B, rows, hidden_size], `condition` [B, 1, hidden_size]; `mask` is that of `additive`."""
        shift, scale, gate, feed_shift, feed_scale, feed_gate = self.modulation(condition).chunk(6, dim=-1)
        modulated = torch.addcmul(shift, self.attention_norm(hidden), 1 + scale)
        hidden = torch.addcmul(hidden, gate, self.attention(modulated, mask, cache, layer))
        modulated = torch.addcmul(feed_shift, self.feed_forward_norm(hidden), 1 + feed_scale)
        return torch.addcmul(hidden, feed_gate, self.feed_forward(modulated))


class OutputNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.modulation = Linear(config.hidden_size, 2 * config.hidden_size)
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, hidden, condition):
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        return torch.addcmul(shift, self.norm(hidden) + self.bias, 1 + scale)


class CaptionCondition(nn.Module):
    """Reads the word embeddings of captions."""

    def __init__(self, config):
        super().__init__()
        self.fc1 = Linear(config.caption_dim, config.hidden_size, bias=False)
        self.fc2 = Linear(config.hidden_size, config.hidden_size, bias=False)
        self.position_embedding = nn.Embedding(config.num_condition_tokens, config.hidden_size)
        self.null_embedding = nn.Parameter(torch.randn(config.hidden_size) * 0.02)

    def forward(
        self,
        prompt_embeds: torch.Tensor,
        prompt_attention_mask: torch.Tensor,
        unconditional: torch.BoolTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.BoolTensor]:
        """A row [B, P, hidden_size] per word, their mean [B, hidden_size] without positions, and which of the rows are
        words, bool [B, P]: none where a caption is `unconditional`, which has a learned vector for the mean."""
        seen = prompt_attention_mask.bool()
        words = self.fc2(F.gelu(self.fc1(prompt_embeds * seen[..., None]), approximate="tanh"))
        places = (seen.long().cumsum(1) - 1).clamp(min=0)
        if unconditional is not None:
            seen = seen & ~unconditional[:, None]
        count = seen.sum(1, keepdim=True)
        mean = (words * seen[..., None]).sum(1) / count.clamp(min=1)
        mean = torch.where(count > 0, mean, self.null_embedding.to(mean.dtype))
        return words + self.position_embedding(places), mean, seen


def _gather(hidden: torch.Tensor, rows: torch.LongTensor) -> torch.Tensor:
    """The `rows` [B, Q] of hidden states or logits [B, rows, C]."""
    return hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[-1]))


class HaltonMaskGITTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """The masked transformer of Halton-MaskGIT, conditioned on a class, as published, or on text. The defaults are the
    published base size of 256 pixels.

    It reads rows without an order: one per place of the picture, then registers, then the words of a text.

    Args:
        conditioning (`str`): "class" or "text".
        grid_size (`int`): tokens along each side of an image.
        hidden_size, intermediate_size, num_layers, num_attention_heads (`int`): the shape of the blocks. A head is
            `hidden_size // num_attention_heads` wide.
        vocab_size (`int`): V image tokens. Token V is the mask.
        num_classes (`int`): number of classes; the label `num_classes` stands for "no class".
        num_registers (`int`): rows that belong to no place.
        num_condition_tokens (`int`): P words of a text.
        caption_dim (`int`): width of the text embeddings.
        dropout (`float`): of embeddings and residual branches, in training.

    Raises:
        ValueError: if there are more heads than channels.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        conditioning: Literal["class", "text"] = "class",
        grid_size: Side = 16,
        hidden_size: Width = 768,
        intermediate_size: Width = 2048,
        num_layers: Layers = 12,
        num_attention_heads: Count = 12,
        vocab_size: Count = 16384,
        num_classes: Classes = 1000,
        num_registers: Whole = 1,
        num_condition_tokens: Count = 1,
        caption_dim: Width = 2048,
        norm_eps: Epsilon = 1e-5,
        dropout: Share = 0.0,
    ):
        super().__init__()
        if num_attention_heads > hidden_size:
            raise ValueError(f"num_attention_heads is {num_attention_heads}: give at most hidden_size, {hidden_size}")
        if self.reads_text:
            self.caption_condition = CaptionCondition(self.config)
        else:
            self.class_embedding = nn.Embedding(num_classes + 1, hidden_size)
        self.token_embedding = TokenEmbedding(vocab_size, hidden_size)
        self.position_embedding = nn.Embedding(grid_size**2, hidden_size)
        self.register_embedding = nn.Embedding(num_registers, hidden_size) if num_registers else None
        self.embedding_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.norm = OutputNorm(self.config)

    @property
    def reads_text(self) -> bool:
        return self.config.conditioning == "text"

    @property
    def num_rows(self) -> int:
        """How many rows a layer has."""
        config = self.config
        return config.grid_size**2 + config.num_registers + (config.num_condition_tokens if self.reads_text else 0)

    def init_weights(self) -> None:
        """Initialise for training: N(0, 0.02), and modulations with which every block is a plain one."""
        init_normal(self)
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        for name, weight in self.named_parameters():
            if "modulation" in name:
                nn.init.zeros_(weight)
        width = self.config.hidden_size
        for block in self.blocks:
            for gate in (2, 5):
                nn.init.ones_(block.modulation.bias[gate * width : (gate + 1) * width])
            for layer in (block.attention.out_proj, block.feed_forward.down_proj):
                layer.weight.data.div_((2 * len(self.blocks)) ** 0.5)

    def forward(
        self,
        tokens: torch.LongTensor,
        class_labels: torch.LongTensor | None = None,
        *,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        unconditional: torch.BoolTensor | None = None,
        places: torch.LongTensor | None = None,
        rows: torch.LongTensor | None = None,
        context: MaskedContext | None = None,
    ) -> torch.Tensor:
        """One forward pass: logits [B, N or Q, V], also of places whose tokens are known. Differentiable without a
        context, for training.

        Args:
            tokens: int64 [B, N] in raster order, V where a token is not decided yet.
            class_labels: int64 [B], for "class".
            prompt_embeds: word embeddings [B, P, caption_dim], for "text", with `prompt_attention_mask` [B, P].
            unconditional: bool [B], which images have no condition instead of theirs.
            places: int64 [B, Q], whose logits to return, N for padding; None for all N.
            rows: int64 [B, M], the only rows to evaluate, `num_rows` for padding. For all others, the keys and values
                in `context` stand in. None evaluates all.
            context: keeps the keys and values of the rows that are evaluated, and their logits if it has room for
                them. Otherwise `places` are among the rows.
        """
        embedded = self._embed(tokens, class_labels, prompt_embeds, prompt_attention_mask, unconditional)
        hidden, condition, mask = embedded
        if context is not None:
            if rows is None:
                context.write_all()
            else:
                hidden = _gather(hidden, rows.clamp(max=self.num_rows - 1))
                context.write_at(rows, self.num_rows)
        for layer, block in enumerate(self.blocks):
            hidden = block(hidden, condition, mask, context, layer)
        every = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        places = every if places is None else places.clamp(max=tokens.shape[1] - 1)
        if context is not None and context.logits is not None:
            evaluated = hidden if rows is not None else hidden[:, : tokens.shape[1]]
            return _gather(context.write_logits(self._logits(evaluated, condition)), places)
        if rows is not None:
            every_row = hidden.new_zeros(len(hidden), self.num_rows + 1, hidden.shape[-1])
            hidden = every_row.scatter(1, rows[..., None].expand_as(hidden), hidden)
        return self._logits(_gather(hidden, places), condition)

    def _logits(self, hidden: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return self.token_embedding(self.norm(hidden, condition))

    def _embed(self, tokens, class_labels, prompt_embeds, prompt_attention_mask, unconditional):
        """All rows [B, rows, hidden_size], the condition [B, 1, hidden_size] of the blocks, and the mask of
        `additive`, None where every row sees all others."""
        batch, device = len(tokens), tokens.device
        parts = [self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1], device=device))]
        if self.register_embedding is not None:
            # A look-up, not the weight itself, which offloading brings only for the forward pass of its module.
            registers = self.register_embedding(torch.arange(self.config.num_registers, device=device))
            parts.append(registers.expand(batch, -1, -1))
        mask = None
        if self.reads_text:
            assert prompt_embeds is not None and prompt_attention_mask is not None
            embeds = prompt_embeds.to(self.dtype)
            words, condition, seen = self.caption_condition(embeds, prompt_attention_mask, unconditional)
            parts.append(words)
            seen = F.pad(seen, (self.num_rows - seen.shape[1], 0), value=True)
            mask = additive(seen[:, None], self.dtype)
        else:
            if unconditional is not None:
                class_labels = torch.where(unconditional, self.config.num_classes, class_labels)
            condition = self.class_embedding(class_labels)
        return self.embedding_dropout(torch.cat(parts, dim=1)), F.silu(condition)[:, None], mask


class HaltonMaskGITModel(BoundNetwork):
    """A `HaltonMaskGITTransformer` with the conditions of one call, as a `MaskedTokenModel` (see
    `arimage.decoding.contract.models`).

    Args:
        transformer: the `HaltonMaskGITTransformer`, or what `torch.compile` made of it. Every forward pass calls it.
        condition: the conditions as its `forward` takes them, one row per image.
        layout: the `Layout` of the tokens, in raster order.
        published: a `ConfidenceSettings`, see `MaskedTokenModel`.
        guided: also compute the logits without the condition.
        codebook: see `BoundNetwork`.
    """

    kind: ClassVar[Literal["masked_tokens"]] = "masked_tokens"
    reads_values = True

    def __init__(
        self,
        transformer: nn.Module,
        condition: dict[str, torch.Tensor],
        layout,
        published,
        *,
        guided: bool = False,
        codebook: torch.Tensor | None = None,
    ):
        check_raster(layout, "Halton-MaskGIT")
        condition = with_unconditional(condition, kept=("prompt_attention_mask",)) if guided else condition
        super().__init__(transformer, Conditions(condition, 1 + guided), codebook)
        self.transformer, self.layout, self.published = transformer, layout, published
        self.num_tokens, self.vocab_size = layout.num_tokens, transformer.config.vocab_size
        self.num_rows = transformer.num_rows

    def open_context(self, batch_size: int, *, logits: bool = False) -> MaskedContext:
        """See `MaskedTokenModel.open_context`."""
        return MaskedContext.of(self, batch_size, self.num_tokens if logits else None)

    def forward(
        self,
        tokens: torch.LongTensor,
        places: torch.LongTensor,
        *,
        rows: torch.LongTensor | None = None,
        context: MaskedContext | None = None,
    ) -> torch.Tensor:
        """Logits [G, B, Q, V] at `places` [B, Q]; see `MaskedTokenModel.forward`."""
        if rows is not None:
            rows = rows.flatten(0, 1) if rows.ndim == 3 else rows.repeat(self.branches, 1)
        logits = self.transformer(
            torch.where(tokens < 0, self.vocab_size, tokens).repeat(self.branches, 1),
            places=places.repeat(self.branches, 1),
            rows=rows,
            context=context,
            **self.conditions.values,
        )
        return logits.unflatten(0, (self.branches, -1))
