"""An upscaler for decoded images: twice as many pixels per token, from the same tokens."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ..models.mixin import ModelMixin
from ..settings.schema import Count, Layers, Widths, checked
from .tiling import check_sides
from .vq_llamagen import channels_last


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        # Without norms, a deep network learns faster if each block starts as the identity.
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.conv2(F.silu(self.conv1(F.silu(hidden))))


def blocks(channels: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(ResidualBlock(channels) for _ in range(count)))


class ImageUpscaler(ModelMixin, ConfigMixin):
    """Enlarges the images that an image tokenizer decodes: bicubic interpolation plus what a U-Net
    (https://arxiv.org/abs/1505.04597) of residual blocks adds. It reads pixels, so one upscaler serves tokenizers that
    decode alike. Before training it is the interpolation alone.

    Args:
        channels (`tuple[int, ...]`): widths of the levels, from the resolution of the input down; each has half the
            resolution of the one before.
        num_blocks (`int`): residual blocks per level on the way down, and as many on the way up.
        scale (`int`): how many times longer the sides become.
    """

    _no_split_modules = ["ResidualBlock"]

    @register_to_config
    @checked
    def __init__(self, channels: Widths = (32, 48, 64), num_blocks: Layers = 2, scale: Count = 2):
        super().__init__()
        self.conv_in = nn.Conv2d(3, channels[0], 3, padding=1)
        self.down = nn.ModuleList(blocks(width, num_blocks) for width in channels)
        self.up = nn.ModuleList(blocks(width, num_blocks) for width in channels)
        self.shrink = nn.ModuleList(nn.Conv2d(above, below, 2, stride=2) for above, below in pairwise(channels))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in pairwise(channels))
        self.conv_out = nn.Conv2d(channels[0], 3 * scale**2, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.conv_out.bias)

    @apply_forward_hook
    def upscale(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, scale * H, scale * W] of images [B, 3, H, W], both nominally in [-1, 1], not clamped.

        Raises:
            ValueError: if a side cannot be halved from level to level.
        """
        check_sides(images, 2 ** len(self.shrink), model="upscaler")
        scale = self.config.scale
        hidden, skipped = self.down[0](self.conv_in(channels_last(images))), []
        for shrink, down in zip(self.shrink, self.down[1:], strict=True):
            skipped.append(hidden)
            hidden = down(shrink(hidden))
        hidden = self.up[-1](hidden)
        for level in reversed(range(len(skipped))):
            hidden = self.up[level](skipped[level] + self.grow[level](hidden))
        # The sum in float32: bfloat16 would round the interpolated levels.
        details = F.pixel_shuffle(self.conv_out(hidden), scale).float()
        return F.interpolate(images.float(), scale_factor=float(scale), mode="bicubic") + details
