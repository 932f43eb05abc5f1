"""The transformer of InfinityStar (https://arxiv.org/abs/2511.04675)."""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from ...kernels.rotary import rotate
from ...models.layers import FeedForward, Linear, attend, check_groups, check_heads
from ...models.llama_blocks import RMSNorm
from ...models.mixin import ModelMixin
from ...models.rotary import frequencies_of
from ...schema import Count, Layers, Width, checked
from .schedules import Pass


NORM_EPS, THETA = 1e-6, 10000.0
# The position of the first pass; those before it are the text's.
FIRST_PASS = 512

# Keys and values [B, heads, P, D] of each layer.
Memory = list[tuple[torch.Tensor, torch.Tensor]]


def rotary_table(positions: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Cosines and sines [T, head_dim / 2, 2] in float32 of positions [T, 4]: pass, frame, row and column turn a
    quarter of the channels each."""
    frequencies = frequencies_of(head_dim // 4, THETA, positions.device)
    angles = (positions.float()[..., None] * frequencies).flatten(1)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


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
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, NORM_EPS), RMSNorm(self.head_dim, NORM_EPS)
        self.out_proj = Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden, rotary, mask, past):
        query, key, value = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=2)
        query, key = (
            rotate(norm(states), rotary).transpose(1, 2) for norm, states in ((self.q_norm, query), (self.k_norm, key))
        )
        own = key, value.transpose(1, 2)
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*past, own, strict=True))
        return self.out_proj(attend(query, keys, values, mask).transpose(1, 2).flatten(2)), own


class Block(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int, intermediate_size: int):
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, NORM_EPS)
        self.attention = Attention(hidden_size, num_heads, num_key_value_heads)
        self.feed_forward_norm = RMSNorm(hidden_size, NORM_EPS)
        self.feed_forward = FeedForward(hidden_size, intermediate_size)

    def forward(self, hidden, rotary, mask, past):
        attended, own = self.attention(self.attention_norm(hidden), rotary, mask, past)
        hidden = hidden + attended
        return hidden + self.feed_forward(self.feed_forward_norm(hidden)), own


class InfinityStarTransformer(ModelMixin, ConfigMixin):
    """Predicts the bits of all cells of a pass at once, from the latents so far. A pass sees its own cells, the text,
    and the last pass of the clip before.

    Args:
        caption_dim (`int`, defaults to 2048): width of the text encoder.
        num_text_tokens (`int`, defaults to 512): the longest text.
        latent_channels (`int`, defaults to 64): of the video tokenizer.
        bits (`tuple[int, int]`, defaults to `(16, 64)`): per cell of coarse and of fine grids.
        hidden_size (`int`, defaults to 4096), num_layers (`int`, defaults to 36), num_attention_heads (`int`,
            defaults to 32), num_key_value_heads (`int`, defaults to 8), intermediate_size (`int`, defaults to 16384):
            of the network.
    """

    _no_split_modules = ["Block"]
    _repeated_blocks = ["Block"]

    @register_to_config
    @checked
    def __init__(
        self,
        caption_dim: Width = 2048,
        num_text_tokens: Count = 512,
        latent_channels: Width = 64,
        bits: tuple[Width, Width] = (16, 64),
        hidden_size: Width = 4096,
        num_layers: Layers = 36,
        num_attention_heads: Count = 32,
        num_key_value_heads: Count = 8,
        intermediate_size: Width = 16384,
    ):
        super().__init__()
        # Four positions, in pairs of channels.
        check_heads(hidden_size, num_attention_heads, 8)
        self.null_embedding = nn.Parameter(torch.zeros(num_text_tokens, caption_dim))
        self.text_projection = Linear(caption_dim, hidden_size)
        self.input_projection = Linear(latent_channels, hidden_size)
        sizes = hidden_size, num_attention_heads, num_key_value_heads, intermediate_size
        self.blocks = nn.ModuleList(Block(*sizes) for _ in range(num_layers))
        self.output_norm = RMSNorm(hidden_size, NORM_EPS)
        self.coarse_head, self.head = (Linear(hidden_size, 2 * count) for count in bits)

    @property
    def head_dim(self) -> int:
        """The channels of an attention head."""
        return self.config.hidden_size // self.config.num_attention_heads

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        *,
        text: bool = False,
        coarse: bool = False,
        mask: torch.Tensor | None = None,
        past: tuple[Memory, ...] = (),
    ) -> tuple[torch.FloatTensor | None, Memory]:
        """One forward pass over T cells or tokens of a text: logits [B, T, bits, 2] in float32, of 0 and 1 for each
        bit (None for a text), and keys and values.

        Args:
            inputs: the latents so far at the places of the cells [B, T, latent_channels], or the embeddings of a text
                [B, T, caption_dim].
            positions: [T, 4], see `cell_positions` and `text_positions`.
            text: whether `inputs` are those of a text.
            coarse: whether the cells have the bits of coarse grids.
            mask: additive [B, 1, 1, P + T], where padding of a text is among the keys.
            past: what else is seen: the text, and the last pass of the clip before.
        """
        hidden = self.text_projection(inputs) if text else self.input_projection(inputs)
        rotary = rotary_table(positions, self.head_dim)[None]
        memory: Memory = []
        for layer, block in enumerate(self.blocks):
            hidden, own = block(hidden, rotary, mask, [one[layer] for one in past])
            memory.append(own)
        if text:
            return None, memory
        head = self.coarse_head if coarse else self.head
        return head(self.output_norm(hidden)).float().unflatten(-1, (-1, 2)), memory
