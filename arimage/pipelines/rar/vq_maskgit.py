"""MaskGIT's image tokenizer (https://arxiv.org/abs/2202.04200) as RAR uses it: a VQGAN without attention, of codes
that are not normalised."""

from itertools import pairwise

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ...kernels.codebook import nearest_code
from ...models.mixin import ModelMixin
from ...settings.schema import Count, Layers, Width, Widths, checked
from ...tokenizers.tiling import TilingMixin, check_sides
from ...tokenizers.vq_llamagen import GroupNormSiLU, Upsample, fast_layout, vectors_of


class ResBlock(nn.Module):
    """A residual block, except where the number of channels changes: there the shortcut convolves the block's own
    output and the input is dropped, as in the published weights."""

    def __init__(self, in_channels: int, out_channels: int, num_groups: int):
        super().__init__()
        self.norm1 = GroupNormSiLU(num_groups, in_channels, eps=1e-6)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = GroupNormSiLU(num_groups, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        changes = in_channels != out_channels
        self.shortcut = nn.Conv2d(out_channels, out_channels, 1, bias=False) if changes else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result = self.conv2(self.norm2(self.conv1(self.norm1(hidden))))
        return hidden + result if self.shortcut is None else result + self.shortcut(result)


def blocks(in_channels: int, out_channels: int, count: int, num_groups: int) -> list[nn.Module]:
    widths = [in_channels] + [out_channels] * count
    return [ResBlock(before, after, num_groups) for before, after in pairwise(widths)]


class Encoder(nn.Module):
    def __init__(self, channels: int, multipliers: list[int], count: int, latent_channels: int, num_groups: int):
        super().__init__()
        widths = [channels, *(channels * multiplier for multiplier in multipliers)]
        lowest = len(multipliers) - 1
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.levels = nn.ModuleList(
            nn.Sequential(*blocks(before, after, count, num_groups), *[nn.AvgPool2d(2)] * (level < lowest))
            for level, (before, after) in enumerate(pairwise(widths))
        )
        self.mid = nn.Sequential(*blocks(widths[-1], widths[-1], count, num_groups))
        self.norm_out = GroupNormSiLU(num_groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], latent_channels, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_in(fast_layout(hidden))
        for level in self.levels:
            hidden = level(hidden)
        return self.conv_out(self.norm_out(self.mid(hidden)))


class Decoder(nn.Module):
    def __init__(self, channels: int, multipliers: list[int], count: int, latent_channels: int, num_groups: int):
        super().__init__()
        widths = [channels * multiplier for multiplier in reversed(multipliers)]
        highest = len(multipliers) - 1
        self.conv_in = nn.Conv2d(latent_channels, widths[0], 3, padding=1)
        self.mid = nn.Sequential(*blocks(widths[0], widths[0], count, num_groups))
        self.levels = nn.ModuleList(
            nn.Sequential(
                *blocks(before, after, count, num_groups), *[Upsample(after) for _ in range(level < highest)]
            )
            for level, (before, after) in enumerate(pairwise([widths[0], *widths]))
        )
        self.norm_out = GroupNormSiLU(num_groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.mid(self.conv_in(fast_layout(hidden)))
        for level in self.levels:
            hidden = level(hidden)
        return self.conv_out(self.norm_out(hidden))


class MaskGITVQModel(TilingMixin, ModelMixin, ConfigMixin):
    """Encodes images to grids of codes and decodes them. The defaults are the published size, of 16 pixels per code.

    An image of H x W pixels becomes H / f x W / f codes, f = 2 ** (len(channel_multipliers) - 1). A code is the row of
    the codebook that is nearest to the encoding.

    Args:
        channels (`int`): width of the first convolution; every level has `channels` times its multiplier.
        channel_multipliers (`tuple[int, ...]`): one per level, from the image's resolution down to the grid's.
        layers_per_block (`int`): residual blocks per level.
        latent_channels (`int`): width of the codebook.
        codebook_size (`int`): entries of the codebook.
        norm_num_groups (`int`): groups of every group norm.

    Raises:
        ValueError: if the groups do not divide the channels.
    """

    _no_split_modules = ["ResBlock"]

    @register_to_config
    @checked
    def __init__(
        self,
        channels: Width = 128,
        channel_multipliers: Widths = (1, 1, 2, 2, 4),
        layers_per_block: Layers = 2,
        latent_channels: Width = 256,
        codebook_size: Count = 1024,
        norm_num_groups: Count = 32,
    ):
        super().__init__()
        if channels % norm_num_groups:
            raise ValueError(
                f"norm_num_groups is {norm_num_groups}: give a number that divides the {channels} channels"
            )
        shape = channels, list(channel_multipliers), layers_per_block, latent_channels, norm_num_groups
        self.encoder = Encoder(*shape)
        self.codebook = nn.Embedding(codebook_size, latent_channels)
        self.decoder = Decoder(*shape)

    def code_vectors(self) -> torch.Tensor:
        """The vectors of all codes [V, latent_channels]."""
        return vectors_of(self.codebook)

    @apply_forward_hook
    def encode(self, images: torch.Tensor) -> torch.LongTensor:
        """Codes [B, H / f, W / f] of images [B, 3, H, W] in [-1, 1] whose sides are divisible by f = `scale_factor`.

        Raises:
            ValueError: if a side of the images is not divisible by `scale_factor`.
        """
        latents = self.encode_latents(images).permute(0, 2, 3, 1)
        return nearest_code(latents.flatten(0, 2), self.code_vectors()).view(latents.shape[:-1])

    @apply_forward_hook
    def encode_latents(self, images: torch.Tensor) -> torch.Tensor:
        """The vectors [B, latent_channels, H / f, W / f] of images, whose nearest codes `encode` returns."""
        check_sides(images, self.scale_factor)
        # The network works on levels from 0 to 1.
        return self.encoded(self.encoder, (images + 1) / 2)

    @apply_forward_hook
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """Images [B, 3, h * f, w * f] of codes [B, h, w], nominally in [-1, 1], not clamped."""
        vectors = self.codebook(codes).permute(0, 3, 1, 2)
        return self.in_tiles(self.decoder, vectors, before=1, after=self.scale_factor) * 2 - 1
