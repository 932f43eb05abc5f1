"""From the tokens of X-Omni to what its diffusion decoder reads."""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ...models.mixin import ModelMixin
from ...settings.schema import Count, Layers, Width, checked
from ...tokenizers.vq_llamagen import vectors_of


class ResBlock(nn.Module):
    def __init__(self, channels: int, num_groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(num_groups, channels, eps=1e-5)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(num_groups, channels, eps=1e-5)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.conv1(F.gelu(self.norm1(hidden)))
        return hidden + self.conv2(F.gelu(self.norm2(inner)))


class XOmniProjector(ModelMixin, ConfigMixin):
    """The codebook of X-Omni's image tokenizer, and the layers from its vectors to semantic features and to the
    channels of the decoder. The image tokenizer itself, a SigLIP, generates nothing and is not part of it.

    Args:
        codebook_size (`int`), codebook_dim (`int`): entries and width of the codebook.
        channels (`int`): channels of the semantic features.
        num_blocks (`int`): residual blocks.
        decoder_dim (`int`, *optional*): width of the decoder; None if there is none.
        norm_num_groups (`int`): groups of every group norm.

    Raises:
        ValueError: if the groups do not divide the channels.
    """

    @register_to_config
    @checked
    def __init__(
        self,
        codebook_size: Count = 16384,
        codebook_dim: Width = 2048,
        channels: Width = 1536,
        num_blocks: Layers = 2,
        decoder_dim: Width | None = None,
        norm_num_groups: Count = 32,
    ):
        super().__init__()
        if channels % norm_num_groups:
            raise ValueError(f"norm_num_groups is {norm_num_groups}: give a divisor of the {channels} channels")
        self.codebook = nn.Embedding(codebook_size, codebook_dim)
        self.conv_in = nn.Conv2d(codebook_dim, channels, 1)
        self.blocks = nn.ModuleList(ResBlock(channels, norm_num_groups) for _ in range(num_blocks))
        self.embed = None if decoder_dim is None else nn.Linear(channels, decoder_dim, bias=False)

    @apply_forward_hook
    def code_vectors(self) -> torch.Tensor:
        """The vectors of all tokens [V, codebook_dim]."""
        return vectors_of(self.codebook)

    @apply_forward_hook
    def features(self, tokens: torch.LongTensor) -> torch.Tensor:
        """Semantic features [B, channels, h, w] of tokens [B, h, w]."""
        hidden = self.conv_in(self.codebook(tokens).permute(0, 3, 1, 2))
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """What is added to the hidden states of the decoder [B, h * w, decoder_dim], of features [B, h * w,
        channels]."""
        assert self.embed is not None
        return self.embed(features)
