"""The transformer of InfinityStar (https://arxiv.org/abs/2511.04675)."""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.rotary import rotate
from ...kernels.step import has_many_rows
from ...kernels.step.head_norms import head_norms
from ...kernels.step.linear import linear
from ...models.layers import FeedForward, Linear, additive, attend, attend_heads, check_groups, check_heads
from ...models.mixin import ModelMixin, TransformerMixin
from ...models.pruning import Pruning, only
from ...models.rotary import turns_at
from ...models.step import StepPlaces, runs_step
from ...models.step_layer import StepLayer, attend_layer, feed_layer, layer_of
from ...settings.schema import Count, Layers, Width, checked
from .cache import ClipCache
from .schedules import Pass, PixelClass, repetitions_of


NORM_EPS, THETA = 1e-6, 10000.0
# The position of the first pass; those before it are the text's.
FIRST_PASS = 512
# How many cells a feed-forward layer reads at once: its own hidden states are four times as wide as the others.
AT_ONCE = 8192


def text_positions(count: int, device: torch.device) -> torch.Tensor:
    """The positions [count, 4] of the tokens of a text."""
    return F.pad(torch.arange(count, device=device)[:, None], (0, 3))


def cell_positions(number: int, one: Pass, finest: tuple[int, int], device: torch.device) -> torch.Tensor:
    """The positions [T, 4] of the cells of a pass, the `number`th of its film. Rows and columns are those of the
    `finest` grid."""
    frames, *grid = one.shape
    places = [torch.arange(frames, device=device) + one.first]
    for side, whole in zip(grid, finest, strict=True):
        places.append((torch.arange(side, device=device) * whole / side).round().long())
    cells = torch.cartesian_prod(*places)
    return torch.cat([torch.full_like(cells[:, :1], FIRST_PASS + number), cells], dim=1)


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int):
        super().__init__()
        check_groups(num_heads, num_key_value_heads)
        self.head_dim = hidden_size // num_heads
        self.heads = [num_heads, num_key_value_heads, num_key_value_heads]
        self.qkv_proj = Linear(hidden_size, sum(self.heads) * self.head_dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim, NORM_EPS), nn.RMSNorm(self.head_dim, NORM_EPS)
        self.out_proj = Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden, rotary, mask, cache, layer):
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        query, key = rotate(self.q_norm(query), rotary), rotate(self.k_norm(key), rotary)
        return self.out_proj(attend_heads(query, key, value, mask, cache, layer))


class Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int, intermediate_size: int):
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, NORM_EPS)
        self.attention = Attention(hidden_size, num_heads, num_key_value_heads)
        self.feed_forward_norm = nn.RMSNorm(hidden_size, NORM_EPS)
        self.feed_forward = FeedForward(hidden_size, intermediate_size)

    def forward(self, hidden, rotary, mask, cache, layer):
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, mask, cache, layer)
        parts = [self.feed_forward(self.feed_forward_norm(part)) for part in hidden.split(AT_ONCE, dim=1)]
        return hidden + (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1))

    def step_layer(self) -> StepLayer:
        """What a step reads of it."""
        own = self.attention
        return layer_of(self, own.qkv_proj, head_norms=(own.q_norm, own.k_norm))

    def step(self, hidden: torch.Tensor, at: StepPlaces, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`forward` of few rows [R, hidden_size] by the kernels of a step, in five launches. `keys` and `values` are
        those that the cache has of the layer."""
        layer = self.step_layer()
        return feed_layer(attend_layer(hidden, layer, at, keys, values), layer)

    def step_wide(self, hidden, rotary, mask, cache, layer):
        """`forward` of many rows by the products of torch, whose sums are part of them: in place, in ten
        launches."""
        own, read = self.attention, self.step_layer()
        states = own.qkv_proj(self.attention_norm(hidden)).unflatten(-1, (-1, own.head_dim))
        keys, values, *past = cache.open(layer, len(hidden))
        gains = own.q_norm.weight, own.k_norm.weight, NORM_EPS
        query = head_norms(states, *gains, keys, values, cache.seen, rotary, *past).transpose(1, 2)
        cache.keep(layer, keys, values)
        attended = attend(query, keys, values, mask).transpose(1, 2).flatten(2)
        rows = linear(attended.flatten(0, 1), read.out.weight, residual=hidden.flatten(0, 1), scale=read.out.scale)
        parts = [feed_layer(part, read) for part in rows.split(AT_ONCE * len(hidden))]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view_as(hidden)


class InfinityStarTransformer(TransformerMixin, ModelMixin, ConfigMixin):
    """Predicts the bits of all cells of a pass at once, from the latents so far. A pass sees its own cells, the text,
    and the last pass of the clip before.

    Args:
        caption_dim (`int`, defaults to 2048): width of the text encoder.
        num_text_tokens (`int`, defaults to 512): the longest text.
        latent_channels (`int`, defaults to 64): of the video tokenizer.
        bits (`tuple[int, int]`, defaults to `(16, 64)`): per cell of coarse and of fine grids.
        pixels (`str`, defaults to "0.40M"): the pixel class of the training films, see `SCHEDULES`.
        semantic_scales (`int`, *optional*), image_scale_repetition (`tuple[int, ...]`, *optional*),
            video_scale_repetition (`tuple[int, ...]`, *optional*): how many of its grids are coarse, and how many
            passes there are over each grid of the first frame and of a clip; by default those of the published models.
        hidden_size (`int`, defaults to 4096), num_layers (`int`, defaults to 36), num_attention_heads (`int`,
            defaults to 32), num_key_value_heads (`int`, defaults to 8), intermediate_size (`int`, defaults to 16384):
            of the network.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        caption_dim: Width = 2048,
        num_text_tokens: Count = 512,
        latent_channels: Width = 64,
        bits: tuple[Width, Width] = (16, 64),
        pixels: PixelClass = "0.40M",
        semantic_scales: Count | None = None,
        image_scale_repetition: tuple[Count, ...] | None = None,
        video_scale_repetition: tuple[Count, ...] | None = None,
        hidden_size: Width = 4096,
        num_layers: Layers = 36,
        num_attention_heads: Count = 32,
        num_key_value_heads: Count = 8,
        intermediate_size: Width = 16384,
    ):
        super().__init__()
        repetitions_of(pixels, semantic_scales, image_scale_repetition, video_scale_repetition)
        # Four positions, in pairs of channels.
        check_heads(hidden_size, num_attention_heads, 8)
        self.null_embedding = nn.Parameter(torch.zeros(num_text_tokens, caption_dim))
        self.text_projection = Linear(caption_dim, hidden_size)
        self.input_projection = Linear(latent_channels, hidden_size)
        sizes = hidden_size, num_attention_heads, num_key_value_heads, intermediate_size
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(num_layers))
        self.output_norm = nn.RMSNorm(hidden_size, NORM_EPS)
        self.coarse_head, self.head = (Linear(hidden_size, 2 * count) for count in bits)

    @property
    def step_parts(self) -> nn.ModuleList:
        """See `runs_kernels`."""
        return self.blocks

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        cache: ClipCache,
        *,
        text: bool = False,
        unconditional: torch.BoolTensor | None = None,
        coarse: bool = False,
        seen: torch.BoolTensor | None = None,
        pruning: Pruning | None = None,
    ) -> torch.FloatTensor | None:
        """One forward pass over T cells: logits [B, T, bits, 2] in float32, of 0 and 1 for each bit. Or one over the T
        tokens of a text, which returns None.

        Args:
            inputs: the latents so far at the places of the cells [B, T, latent_channels], or the embeddings of a text
                [B, T, caption_dim].
            positions: [T, 4], see `cell_positions` and `text_positions`.
            cache: what else the cells see, and where keys and values are kept.
            text: whether `inputs` are those of a text.
            unconditional: bool [B], which rows get the learned embeddings in place of their text.
            coarse: whether the cells have the bits of coarse grids.
            seen: [B, P], which tokens of the text are none of its padding; None if all are.
            pruning: which of the cells pass through the layers, if not all do.
        """
        if text:
            if unconditional is not None:
                null = self.null_embedding[: inputs.shape[1]]
                inputs = torch.where(unconditional[:, None, None], null, inputs.to(null.dtype))
            hidden = self.text_projection(inputs.to(self.dtype))
        else:
            hidden = self.input_projection(inputs.to(self.dtype))
        whole, cells, rotary = hidden, None, turns_at(positions, self.head_dim, THETA)[None]
        if pruning is not None:
            cells = pruning.choose(hidden)
            hidden, rotary = only(hidden, cells), rotary if cells is None else rotary[0][cells]
        steps = runs_step(self)
        if steps and not (text or has_many_rows(hidden.flatten(0, 1))) and cache.first is None:
            (count, own), rows = hidden.shape[:2], hidden.flatten(0, 1)
            at = cache.places(count, own, rotary, seen)
            for layer, block in enumerate(self.blocks):
                rows = block.step(rows, at, *(cached[:count] for cached in cache.of_layer(layer)))
            hidden = rows.view_as(hidden)
        else:
            mask = None
            if seen is not None:
                visible = F.pad(seen, (0, cache.attended - seen.shape[1]), value=True)
                mask = additive(visible[:, None], self.dtype)
            if steps and pruning is not None and hidden is whole:
                # Sums are taken in place, and `restore` needs the states before.
                hidden = hidden.clone()
            for layer, block in enumerate(self.blocks):
                run = block.step_wide if steps else block
                hidden = run(hidden, rotary, mask, cache, layer)
        if text:
            return None
        if pruning is not None:
            hidden = pruning.restore(whole, hidden, cells)
        head = self.coarse_head if coarse else self.head
        return head(self.output_norm(hidden)).float().unflatten(-1, (-1, 2))
