"""The transformer of Infinity (https://arxiv.org/abs/2412.04431): next-scale prediction of bits from a text."""

import math

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.rotary import rotate
from ...kernels.step import has_many_rows
from ...kernels.step.attention import text_attention
from ...models import modulated_blocks
from ...models.layers import Linear, attend, attend_heads, check_heads
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.modulated_blocks import (
    NORM_EPS,
    CastingLinear,
    FeedForward,
    Float32Linear,
    Offset,
    init_modulated,
)
from ...models.rotary import turns_at
from ...models.scale_model import ScaleTransformer
from ...models.step import runs_kernels
from ...settings.schema import Count, Layers, Width, checked
from .schedules import PixelClass, Schedule


def rotary_table(schedule: Schedule, head_dim: int, device: torch.device) -> torch.Tensor:
    """The cosines and sines [N, head_dim / 2, 2] of the cells of all maps, for `rotate`. Half of the angles are those
    of the rows, half those of the columns; every map is stretched onto the finest of the largest images."""
    tables = []
    for grid in schedule.scales:
        places = [
            torch.round(torch.arange(length, dtype=torch.float32, device=device) * whole / length)
            for length, whole in zip(grid, schedule.whole, strict=True)
        ]
        tables.append(turns_at(torch.cartesian_prod(*places), head_dim, 10000.0))
    return torch.cat(tables)


class Float32RMSNorm(nn.RMSNorm):
    def forward(self, hidden):
        return F.rms_norm(hidden.float(), self.normalized_shape, self.weight.float(), self.eps)


class Float32LayerNorm(nn.LayerNorm):
    def forward(self, hidden):
        weight, bias = self.weight.to(hidden.dtype), self.bias.to(hidden.dtype)
        return F.layer_norm(hidden, self.normalized_shape, weight, bias, self.eps)


class Attention(modulated_blocks.Attention):
    """Attention of unit vectors, which are rotated, in float32."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__(hidden_size, num_heads, qk_norm=True, dropout=0.0, first=CastingLinear)
        self.log_query_scale = nn.Parameter(torch.full((num_heads,), math.log(4.0)))
        self.length = self.softmax_scale = 1.0

    def forward(self, hidden, mask, cache=None, layer=0, rotary=None):
        qkv = self.qkv_proj(hidden).unflatten(-1, (3, self.num_heads, -1))
        value = qkv[:, :, 2]
        query, key = F.normalize(qkv[:, :, :2].float(), dim=-1).unbind(2)
        query = query * self.log_query_scale.float().clamp(max=math.log(100.0)).exp()[:, None]
        query, key = (rotate(states, rotary).to(value.dtype) for states in (query, key))
        return self.out_proj(attend_heads(query, key, value, mask, cache, layer, self.softmax_scale))


class CrossAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm = Float32LayerNorm(hidden_size, eps=NORM_EPS)
        self.q_proj = CastingLinear(hidden_size, hidden_size)
        self.kv_proj = CastingLinear(hidden_size, 2 * hidden_size)
        self.out_proj = Linear(hidden_size, hidden_size)

    def project_text(self, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values [B, heads, P, D] of the text [B, P, C]."""
        projected = self.kv_proj(text).unflatten(-1, (2, self.num_heads, -1))
        key, value = projected.transpose(1, 3).unbind(2)
        return key, value

    def forward(self, hidden, key, value, mask):
        query = self.q_proj(self.norm(hidden)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        attended = attend(query, key, value, mask.to(query.dtype))
        return self.out_proj(attended.transpose(1, 2).flatten(2))

    def step(self, before, after, key, value, visible):
        """`forward` of a `Sum` and the residual connection around it by the kernels of `arimage.kernels.step`: the
        sum before the norm `after`. `visible` is the mask, or of few rows bool [B, P]."""
        if has_many_rows(before.rows):
            query = before.launch(self.q_proj).view(len(key), -1, self.num_heads, key.shape[-1])
            attended = attend(query.transpose(1, 2), key, value, visible).transpose(1, 2).reshape(before.rows.shape)
        else:
            layer, norm = self.q_proj, self.norm
            product = layer.weight, layer.bias, NORM_EPS, norm.weight, norm.bias
            attended = text_attention(before.rows, *product, key, value, visible)
        return before.add(self.out_proj, attended, after)


class Block(modulated_blocks.Block):
    def __init__(self, config):
        super().__init__()
        size = config.hidden_size
        self.attention = Attention(size, config.num_attention_heads)
        self.cross_attention = CrossAttention(size, config.num_attention_heads)
        self.feed_forward = FeedForward(size, config.intermediate_size, 0.0, CastingLinear)
        self.modulation = Offset(6 * size)

    def between(self, hidden, key, value, text_mask):
        return hidden + self.cross_attention(hidden, key, value, text_mask).float()

    def step_between(self, attend, norm, key, value, text_mask):
        own = self.cross_attention.norm
        before = attend({"eps": NORM_EPS, "norm_weight": own.weight, "norm_bias": own.bias})
        return self.cross_attention.step(before, norm, key, value, text_mask)


class BitHead(Float32Linear):
    """Two logits for each bit."""

    def forward(self, hidden):
        return super().forward(hidden).unflatten(-1, (-1, 2))

    def step(self, before):
        return super().step(before).unflatten(-1, (-1, 2))


class TextPool(nn.Module):
    """A learned query [heads, C / heads] attends to the text [B, P, Ct], which gives a vector [B, C] of all of it."""

    def __init__(self, caption_dim: int, hidden_size: int, num_heads: int):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(num_heads, hidden_size // num_heads))
        self.kv_proj = Float32Linear(caption_dim, 2 * hidden_size)
        self.out_proj = Float32Linear(hidden_size, hidden_size)

    def forward(self, text, mask):
        key, value = self.kv_proj(text).unflatten(-1, (2, len(self.query), -1)).transpose(1, 3).unbind(2)
        query = self.query.float()[None, :, None].expand(len(text), -1, -1, -1)
        return self.out_proj(attend(query, key, value, mask).flatten(1))


class InfinityTransformer(ScaleTransformer, TransformerMixin, ModelMixin, ConfigMixin):
    """The next-scale transformer of Infinity. The defaults are the published 2B.

    An image is K maps of cells with b bits each, from coarse to fine. All bits of a map are predicted in one forward
    pass, independently of each other, from the sum of the maps before it. The text is seen by cross-attention, and a
    vector of it modulates all layers. Norms, modulations, the head and the residual stream are computed in float32.

    Args:
        caption_dim (`int`): width of the text embeddings.
        num_text_tokens (`int`): the longest text in tokens; an image without a text sees as many learned embeddings
            as its text has tokens.
        bits (`int`): bits of a cell.
        hidden_size, num_layers, num_attention_heads, intermediate_size (`int`): the transformer's shape.
        num_pool_heads (`int`): heads of the attention that turns the text into a vector.
        num_levels (`int`): the largest number of maps.
        pixels (`str`): the pixel class of the training images: "0.06M", "0.25M", "0.60M" or "1M".
    """

    in_float32 = True

    @register_to_config
    @checked
    def __init__(
        self,
        caption_dim: Width = 2048,
        num_text_tokens: Count = 512,
        bits: Count = 32,
        hidden_size: Width = 2048,
        num_layers: Layers = 32,
        num_attention_heads: Count = 16,
        intermediate_size: Width = 8192,
        num_pool_heads: Count = 16,
        num_levels: Count = 15,
        pixels: PixelClass = "1M",
    ):
        super().__init__()
        check_heads(hidden_size, num_attention_heads, 4)
        check_heads(hidden_size, num_pool_heads)
        self.text_norm = Float32RMSNorm(caption_dim, eps=NORM_EPS)
        self.null_embedding = nn.Parameter(torch.zeros(num_text_tokens, caption_dim))
        self.text_pool = TextPool(caption_dim, hidden_size, num_pool_heads)
        self.text_fc1 = Float32Linear(caption_dim, hidden_size)
        self.text_fc2 = Float32Linear(hidden_size, hidden_size)
        self.start_position = nn.Parameter(torch.zeros(hidden_size))
        self.input_projection = Float32Linear(bits, hidden_size)
        self.level_embedding = nn.Embedding(num_levels, hidden_size)
        self.shared_modulation = Float32Linear(hidden_size, 6 * hidden_size)
        self.blocks = nn.ModuleList(Block(self.config) for _ in range(num_layers))
        self.head_modulation = Float32Linear(hidden_size, 2 * hidden_size)
        self.head = BitHead(hidden_size, 2 * bits)

    def init_weights(self) -> None:
        """Initialise for training: see `init_modulated`."""
        init_modulated(self, self.start_position, self.text_pool.query, self.null_embedding)

    def embed_condition(
        self,
        prompt_embeds: torch.Tensor,
        prompt_attention_mask: torch.Tensor,
        unconditional: torch.BoolTensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The vector of the text [B, hidden_size] and its tokens [B, P, hidden_size], both in float32, and which of
        them are not padding, bool [B, P].

        Args:
            prompt_embeds: [B, P, caption_dim], right-padded, with `prompt_attention_mask` [B, P].
            unconditional: bool [B], which images get the learned embeddings in place of their text.
        """
        visible = prompt_attention_mask.bool()
        # Padding may hold any values.
        text = prompt_embeds.float().masked_fill(~visible[..., None], 0)
        if unconditional is not None:
            null = self.null_embedding.float()[: text.shape[1]]
            null = F.pad(null, (0, 0, 0, text.shape[1] - len(null)))
            text = torch.where(unconditional[:, None, None], null, text)
        text = self.text_norm(text)
        mask = visible.float().log()[:, None, None]
        return self.text_pool(text, mask), self.text_fc2(F.gelu(self.text_fc1(text), approximate="tanh")), visible

    def read_condition(self, **condition):
        vector, text, visible = self.embed_condition(**condition)
        *modulations, before_head = self.modulations(vector)
        if runs_kernels(self):
            # Once for all blocks.
            text = text.to(self.dtype)
        read = [block.cross_attention.project_text(text) for block in self.blocks]
        blocks = [(*modulation, *each) for modulation, each in zip(modulations, read, strict=True)]
        return vector[:, None] + self.start_position.float(), None, [*blocks, (*before_head, visible)]

    def predict(self, inputs: torch.Tensor, schedule: Schedule, **condition) -> torch.FloatTensor:
        """Teacher-forced logits [B, N, bits, 2] in float32 of all cells, coarse to fine, given the condition
        (arguments of `embed_condition`) and the transformer's inputs [B, N - 1, bits] for the maps after the first.
        Differentiable, for training."""
        rotary = rotary_table(schedule, self.head_dim, inputs.device)
        return self.predict_maps(inputs, [rows * columns for rows, columns in schedule.scales], rotary, **condition)
