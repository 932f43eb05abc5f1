"""Layers of Llama as visual autoregressive models use them, and their condition: a class or a text."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..kernels.rotary import rotate
from .layers import FeedForward, Linear, RMSNorm, attend_heads, causal_mask, check_groups
from .rotary import turns_at
from .step import StepPlaces
from .step_layer import attend_layer, feed_layer, layer_of


def rotary_table(
    head_dim: int, grid: tuple[int, int], prefix: int, theta: float, device: torch.device, prefix_keys: bool = False
) -> torch.Tensor:
    """Cosines and sines [prefix + rows * columns, head_dim / 2, 2] in float32. The first half of the angles depends on
    the row, the second on the column. The prefix rows are zero, so that condition tokens have zero queries and keys
    and attention averages them; with `prefix_keys` they rotate by nothing."""
    places = torch.cartesian_prod(*(torch.arange(side, device=device) for side in grid))
    table = F.pad(turns_at(places, head_dim, theta), (0, 0, 0, 0, prefix, 0))
    if prefix_keys:
        table[:prefix, :, 0] = 1
    return table


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, num_key_value_heads: int, dropout: float):
        super().__init__()
        check_groups(num_heads, num_key_value_heads)
        self.head_dim = hidden_size // num_heads
        self.heads = [num_heads, num_key_value_heads, num_key_value_heads]
        self.qkv_proj = Linear(hidden_size, sum(self.heads) * self.head_dim, bias=False)
        self.out_proj = Linear(hidden_size, hidden_size, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, rotary, mask, cache=None, layer=0):
        states = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query, key, value = self.heads
        rotated, value = states.split([query + key, value], dim=2)
        query, key = rotate(rotated, rotary).split([query, key], dim=2)
        hidden = self.out_proj(attend_heads(query, key, value, mask, cache, layer))
        return self.dropout(hidden) if self.training else hidden


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        kv_heads = config.num_key_value_heads or config.num_attention_heads
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = Attention(config.hidden_size, config.num_attention_heads, kv_heads, config.dropout)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config.hidden_size, config.intermediate_size, config.dropout)

    def forward(self, hidden, rotary, mask, cache=None, layer=0):
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, mask, cache, layer)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))

    def step(self, hidden: torch.Tensor, at: StepPlaces, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`forward` of the rows `hidden` [R, hidden_size] by the kernels of a step, in five launches if they are few,
        otherwise in place. `keys` and `values` are all those that the cache has of the layer."""
        layer = layer_of(self, self.attention.qkv_proj)
        return feed_layer(attend_layer(hidden, layer, at, keys, values), layer)


class CaptionProjection(nn.Module):
    def __init__(self, caption_dim: int, hidden_size: int, num_tokens: int):
        super().__init__()
        self.fc1 = Linear(caption_dim, hidden_size, bias=False)
        self.fc2 = Linear(hidden_size, hidden_size, bias=False)
        self.register_buffer("null_caption", torch.empty(num_tokens, caption_dim).normal_(std=caption_dim**-0.5))

    def forward(self, caption, unconditional=None):
        # Here, since offloading brings the tensors of a module only for its own forward pass.
        if unconditional is not None:
            caption = torch.where(unconditional[:, None, None], self.null_caption, caption)
        return self.fc2(F.gelu(self.fc1(caption), approximate="tanh"))


class ClassOrTextCondition:
    """The prefix of a transformer: a class or a text, as `conditioning` in its config says."""

    config: Any
    dtype: torch.dtype
    head_dim: int

    @property
    def reads_text(self) -> bool:
        return self.config.conditioning == "text"

    def add_condition(self) -> None:
        """Add the parameters of the condition."""
        config = self.config
        if self.reads_text:
            self.caption_projection = CaptionProjection(
                config.caption_dim, config.hidden_size, config.num_condition_tokens
            )
        else:
            self.class_embedding = nn.Embedding(config.num_classes + 1, config.hidden_size)

    def embed_condition(
        self,
        class_labels: torch.LongTensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        prompt_attention_mask: torch.Tensor | None = None,
        unconditional: torch.BoolTensor | None = None,
    ) -> torch.Tensor:
        """Prefix embeddings [B, P, hidden_size].

        Args:
            class_labels: [B], for "class".
            prompt_embeds: [B, P, caption_dim], **left**-padded, for "text", with `prompt_attention_mask` [B, P].
            unconditional: bool [B], which images get the learned "no condition" in place of theirs.
        """
        if not self.reads_text:
            if unconditional is not None:
                class_labels = torch.where(unconditional, self.config.num_classes, class_labels)
            return self.class_embedding(class_labels)[:, None]
        assert prompt_embeds is not None and prompt_attention_mask is not None
        caption = (prompt_embeds * prompt_attention_mask.bool()[..., None]).to(self.dtype)
        return self.caption_projection(caption, unconditional)

    def prefix_mask(self, class_labels=None, prompt_attention_mask=None, **_) -> torch.BoolTensor:
        """Which prefix positions are visible, bool [B, P]. As in the original, a prompt's positions stay visible
        without its text."""
        if not self.reads_text:
            return torch.ones_like(class_labels, dtype=torch.bool)[:, None]
        assert prompt_attention_mask is not None
        return prompt_attention_mask.bool()

    def teacher_forcing(self, prefix_mask: torch.BoolTensor, count: int) -> tuple[torch.Tensor, torch.BoolTensor]:
        """For a prefix that is visible where `prefix_mask` [B, P] and `count` tokens on the trained grid: the
        `rotary_table` of the prefix and the whole grid, and the `causal_mask`."""
        grid = (self.config.grid_size,) * 2
        theta, device = self.config.rope_theta, prefix_mask.device
        keys = self.config.get("reads_words", False)
        table = rotary_table(self.head_dim, grid, prefix_mask.shape[1], theta, device, keys)
        return table, causal_mask(prefix_mask, count)
