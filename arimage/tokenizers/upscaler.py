"""An upscaler for decoded images: twice as many pixels per token, from the same tokens."""

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ..schema import Count, Layers, Width, checked
from .vq_llamagen import channels_last


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.conv2(F.silu(self.conv1(F.silu(hidden))))


class ImageUpscaler(ModelMixin, ConfigMixin):
    """Enlarges the images that an image tokenizer decodes: bicubic interpolation plus what a residual network adds
    (as in EDSR, https://arxiv.org/abs/1707.02921). It reads pixels, so one upscaler serves tokenizers that decode
    alike. Before training it is the interpolation alone.

    Args:
        channels (`int`): width of the convolutions, all of which run at the size of the input.
        num_blocks (`int`): residual blocks of two convolutions.
        scale (`int`): how many times longer the sides become.
    """

    _no_split_modules = ["ResidualBlock"]

    @register_to_config
    @checked
    def __init__(self, channels: Width = 48, num_blocks: Layers = 6, scale: Count = 2):
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(num_blocks))
        self.conv_out = nn.Conv2d(channels, 3 * scale**2, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.conv_out.bias)

    @apply_forward_hook
    def upscale(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, scale * H, scale * W] of images [B, 3, H, W], both nominally in [-1, 1], not clamped."""
        scale = self.config.scale
        hidden = self.conv_in(channels_last(images))
        for block in self.blocks:
            hidden = block(hidden)
        # The sum in float32: bfloat16 would round the interpolated levels.
        details = F.pixel_shuffle(self.conv_out(hidden), scale).float()
        return F.interpolate(images.float(), scale_factor=float(scale), mode="bicubic") + details
