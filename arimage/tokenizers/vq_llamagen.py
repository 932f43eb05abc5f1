"""The VQ tokenizer of LlamaGen (https://arxiv.org/abs/2406.06525): a CompVis VQGAN whose codes live on the unit
sphere."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ..kernels.codebook import nearest_code
from ..kernels.group_norm import group_norm_silu
from ..models.layers import GroupNorm
from ..models.mixin import ModelMixin
from ..settings.schema import Count, Layers, Width, Widths, checked
from .tiling import TilingMixin, check_encoded, check_sides


class GroupNormSiLU(nn.GroupNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return group_norm_silu(hidden, self.num_groups, self.weight, self.bias, self.eps)


class ResBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, num_groups: int):
        super().__init__()
        self.norm1 = GroupNormSiLU(num_groups, in_channels, eps=1e-6)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = GroupNormSiLU(num_groups, out_channels, eps=1e-6)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual = self.shortcut(hidden)
        hidden = self.conv2(self.norm2(self.conv1(self.norm1(hidden))))
        hidden += residual
        return hidden


class SpatialAttention(nn.Module):
    def __init__(self, channels: int, num_groups: int):
        super().__init__()
        self.norm = GroupNorm(num_groups, channels, eps=1e-6)
        self.to_q = nn.Conv2d(channels, channels, 1)
        self.to_k = nn.Conv2d(channels, channels, 1)
        self.to_v = nn.Conv2d(channels, channels, 1)
        self.to_out = nn.Conv2d(channels, channels, 1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        query, key, value = (
            proj(normed).flatten(2).transpose(1, 2).unsqueeze(1) for proj in (self.to_q, self.to_k, self.to_v)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        return hidden + self.to_out(attended.squeeze(1).transpose(1, 2).reshape(hidden.shape))


def channels_last(hidden: torch.Tensor) -> torch.Tensor:
    """`hidden` in the memory format that convolutions keep, and in which they are faster."""
    return hidden.contiguous(memory_format=torch.channels_last)


def fast_layout(hidden: torch.Tensor) -> torch.Tensor:
    """`channels_last` of a network with group norms: not on a CPU, where those work on contiguous images."""
    return hidden if hidden.device.type == "cpu" else channels_last(hidden)


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(hidden, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(hidden, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """One resolution: residual blocks, each followed by attention at the lowest level, then a change of resolution."""

    def __init__(self, channels: list[int], attention: bool, num_groups: int, resample: nn.Module):
        super().__init__()
        self.res = nn.ModuleList(ResBlock(a, b, num_groups) for a, b in pairwise(channels))
        self.attn = nn.ModuleList(
            SpatialAttention(c, num_groups) if attention else nn.Identity() for c in channels[1:]
        )
        self.resample = resample

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for res, attn in zip(self.res, self.attn, strict=True):
            hidden = attn(res(hidden))
        return self.resample(hidden)


def middle(channels: int, num_groups: int, attention: bool) -> nn.Sequential:
    return nn.Sequential(
        ResBlock(channels, channels, num_groups),
        SpatialAttention(channels, num_groups) if attention else nn.Identity(),
        ResBlock(channels, channels, num_groups),
    )


class Encoder(nn.Module):
    def __init__(
        self,
        channels: int,
        multipliers: list[int],
        blocks: int,
        latent_channels: int,
        num_groups: int,
        attention: bool = True,
    ):
        super().__init__()
        if channels % num_groups:
            raise ValueError(f"norm_num_groups is {num_groups}: give a number that divides the {channels} channels")
        widths = [channels, *(channels * m for m in multipliers)]
        lowest = len(multipliers) - 1
        self.conv_in = nn.Conv2d(3, channels, 3, padding=1)
        self.levels = nn.ModuleList(
            Level(
                [before] + [after] * blocks,
                attention=attention and i == lowest,
                num_groups=num_groups,
                resample=nn.Identity() if i == lowest else Downsample(after),
            )
            for i, (before, after) in enumerate(pairwise(widths))
        )
        self.mid = middle(widths[-1], num_groups, attention)
        self.norm_out = GroupNormSiLU(num_groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], latent_channels, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.conv_in(fast_layout(hidden))
        for level in self.levels:
            hidden = level(hidden)
        return self.conv_out(self.norm_out(self.mid(hidden)))


class Decoder(nn.Module):
    def __init__(
        self,
        channels: int,
        multipliers: list[int],
        blocks: int,
        latent_channels: int,
        num_groups: int,
        attention: bool = True,
    ):
        super().__init__()
        widths = [channels * m for m in reversed(multipliers)]
        highest = len(multipliers) - 1
        self.conv_in = nn.Conv2d(latent_channels, widths[0], 3, padding=1)
        self.mid = middle(widths[0], num_groups, attention)
        self.levels = nn.ModuleList(
            Level(
                [before] + [after] * blocks,
                attention=attention and i == 0,
                num_groups=num_groups,
                resample=nn.Identity() if i == highest else Upsample(after),
            )
            for i, (before, after) in enumerate(pairwise([widths[0], *widths]))
        )
        self.norm_out = GroupNormSiLU(num_groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.mid(self.conv_in(fast_layout(hidden)))
        for level in self.levels:
            hidden = level(hidden)
        return self.conv_out(self.norm_out(hidden))


def vectors_of(codebook: nn.Embedding) -> torch.Tensor:
    """All vectors of a codebook [V, D], by a look-up, since offloading loads a weight only while its module runs."""
    device = codebook.weight.device
    return codebook(torch.arange(codebook.num_embeddings, device="cpu" if device.type == "meta" else device))


class LlamaGenVQModel(TilingMixin, ModelMixin, ConfigMixin):
    """Encodes images to grids of codes and decodes them. The defaults are the published VQ-16; VQ-8 has multipliers
    (1, 2, 2, 4).

    An image of H x W pixels becomes H / f x W / f codes, f = 2 ** (len(channel_multipliers) - 1). A code is the row of
    the l2-normalised codebook that is nearest to the l2-normalised encoding.

    Args:
        channels (`int`): width of the first convolution; every level has `channels` times its multiplier.
        channel_multipliers (`tuple[int, ...]`): one per level, from the image's resolution down to the grid's.
        layers_per_block (`int`): residual blocks per level in the encoder; the decoder has one more.
        latent_channels (`int`): channels between the convolutions and the projection to the codebook.
        codebook_size (`int`), codebook_dim (`int`): entries and width of the codebook.
        norm_num_groups (`int`): groups of every group norm.
    """

    _no_split_modules = ["ResBlock", "SpatialAttention"]

    @register_to_config
    @checked
    def __init__(
        self,
        channels: Width = 128,
        channel_multipliers: Widths = (1, 1, 2, 2, 4),
        layers_per_block: Layers = 2,
        latent_channels: Width = 256,
        codebook_size: Count = 16384,
        codebook_dim: Width = 8,
        norm_num_groups: Count = 32,
    ):
        super().__init__()
        multipliers = list(channel_multipliers)
        self.encoder = Encoder(channels, multipliers, layers_per_block, latent_channels, norm_num_groups)
        self.quant_conv = nn.Conv2d(latent_channels, codebook_dim, 1)
        self.codebook = nn.Embedding(codebook_size, codebook_dim)
        self.post_quant_conv = nn.Conv2d(codebook_dim, latent_channels, 1)
        self.decoder = Decoder(channels, multipliers, layers_per_block + 1, latent_channels, norm_num_groups)

    @apply_forward_hook
    def encode(self, images: torch.Tensor) -> torch.LongTensor:
        """Codes [B, H / f, W / f] of images [B, 3, H, W] in [-1, 1] whose sides are divisible by f = `scale_factor`.

        Raises:
            ValueError: if a side of the images is not divisible by `scale_factor`.
        """
        return self.nearest(check_encoded(self.encode_latents(images)))

    @apply_forward_hook
    def encode_latents(self, images: torch.Tensor) -> torch.Tensor:
        """The unit vectors [B, codebook_dim, H / f, W / f] of images, whose nearest codes `encode` returns."""
        check_sides(images, self.scale_factor)
        encoded = self.in_tiles(self.encoder, images, before=self.scale_factor, after=1)
        return F.normalize(self.quant_conv(encoded), dim=1)

    def code_vectors(self) -> torch.Tensor:
        """The unit vectors of all codes [V, codebook_dim]."""
        return F.normalize(vectors_of(self.codebook), dim=-1)

    def nearest(self, latents: torch.Tensor) -> torch.LongTensor:
        """The codes [B, h, w] with the greatest cosine similarity to latents [B, codebook_dim, h, w]."""
        latents = F.normalize(latents.permute(0, 2, 3, 1), dim=-1)
        return nearest_code(latents.flatten(0, 2), self.code_vectors()).view(latents.shape[:-1])

    def lookup(self, codes: torch.LongTensor) -> torch.Tensor:
        """The unit vectors [B, codebook_dim, h, w] of codes [B, h, w]."""
        return F.normalize(self.codebook(codes), dim=-1).permute(0, 3, 1, 2)

    @apply_forward_hook
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """Images [B, 3, h * f, w * f] of codes [B, h, w], nominally in [-1, 1], not clamped."""
        latents = self.post_quant_conv(self.lookup(codes))
        return self.in_tiles(self.decoder, latents, before=1, after=self.scale_factor)

    @apply_forward_hook
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, h * f, w * f] of code vectors [B, codebook_dim, h, w], not clamped."""
        return self.in_tiles(self.decoder, self.post_quant_conv(latents), before=1, after=self.scale_factor)
