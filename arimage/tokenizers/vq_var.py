"""The multi-scale residual tokenizer of VAR (https://arxiv.org/abs/2404.02905): an image as token maps from coarse to
fine."""

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ..kernels.codebook import nearest_code
from ..models.mixin import ModelMixin
from ..settings.schema import Count, Layers, Scales, Share, Whole, Width, Widths, checked
from .tiling import TilingMixin, check_encoded
from .vq_llamagen import Decoder, Encoder, vectors_of


class Phi(nn.Conv2d):
    """Blends a map [B, C, h, w] with its 3x3 convolution, in the dtype and on the device of the map, not of the
    weights."""

    def __init__(self, channels: int, weight: float):
        super().__init__(channels, channels, 3, padding=1)
        self.phi_weight = weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        convolved = F.conv2d(hidden, self.weight.to(hidden), self.bias.to(hidden), padding=1)
        return (1 - self.phi_weight) * hidden + self.phi_weight * convolved


def phi_indices(num_scales: int, num_phi: int) -> list[int]:
    """The index of the convolution, among `num_phi`, that each scale uses: the nearest on a line from the first scale
    to the last."""
    margin = 1 / 3 / num_phi if num_phi == 4 else 1 / 2 / num_phi
    # In float64: rounding decides two ties of the published ten scales.
    ticks = np.linspace(margin, 1 - margin, num_phi)
    return [int(np.abs(ticks - scale / (num_scales - 1)).argmin()) for scale in range(num_scales)]


class VARVQModel(TilingMixin, ModelMixin, ConfigMixin):
    """Encodes images to token maps of growing size, each a correction of the sum of those before it, and decodes them.

    The defaults are those of the published tokenizer. Images have exactly P * f pixels along each side, P =
    `scales[-1]` and f = 2 ** (len(channel_multipliers) - 1). All between encoder and decoder is computed in float32,
    whatever the dtype of the model.

    Args:
        channels (`int`): width of the first convolution; every level has `channels` times its multiplier.
        channel_multipliers (`tuple[int, ...]`): one per level, from the image's resolution down to the latents'.
        layers_per_block (`int`): residual blocks per level in the encoder; the decoder has one more.
        codebook_size (`int`), codebook_dim (`int`): entries V and width C of the codebook. Latents have C channels.
        scales (`tuple[int, ...]`): sides p of the token maps, at least two, from coarse to fine.
        num_phi (`int`): convolutions that the scales share for their upsampled maps; 0 means one per scale.
        phi_weight (`float`): the share of an upsampled map that its convolution replaces, 0 to 1.
        norm_num_groups (`int`): groups of every group norm.
    """

    _no_split_modules = ["ResBlock", "SpatialAttention"]

    @register_to_config
    @checked
    def __init__(
        self,
        channels: Width = 160,
        channel_multipliers: Widths = (1, 1, 2, 2, 4),
        layers_per_block: Layers = 2,
        codebook_size: Count = 4096,
        codebook_dim: Width = 32,
        scales: Scales = (1, 2, 3, 4, 5, 6, 8, 10, 13, 16),
        num_phi: Whole = 4,
        phi_weight: Share = 0.5,
        norm_num_groups: Count = 32,
    ):
        super().__init__()
        multipliers = list(channel_multipliers)
        self.encoder = Encoder(channels, multipliers, layers_per_block, codebook_dim, norm_num_groups)
        self.quant_conv = nn.Conv2d(codebook_dim, codebook_dim, 3, padding=1)
        self.codebook = nn.Embedding(codebook_size, codebook_dim)
        num_phi = num_phi or len(scales)
        self.phi = nn.ModuleList(Phi(codebook_dim, phi_weight) for _ in range(num_phi))
        self.phi_index = phi_indices(len(scales), num_phi)
        self.post_quant_conv = nn.Conv2d(codebook_dim, codebook_dim, 3, padding=1)
        self.decoder = Decoder(channels, multipliers, layers_per_block + 1, codebook_dim, norm_num_groups)

    def code_vectors(self) -> torch.Tensor:
        """The vectors of all codes [V, C]."""
        return vectors_of(self.codebook)

    def to_maps(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Tokens or vectors [B, N, ...] of all scales as one map [B, p, p, ...] per scale."""
        maps = parts.split([side**2 for side in self.config.scales], dim=1)
        return [part.unflatten(1, (side, side)) for part, side in zip(maps, self.config.scales, strict=True)]

    @apply_forward_hook
    def encode(self, images: torch.Tensor) -> list[torch.LongTensor]:
        """One token map [B, p, p] per scale, from coarse to fine, of images [B, 3, P * f, P * f] in [-1, 1].

        Tiling does not apply: the coarse maps describe the image as a whole. Slicing does.

        Raises:
            ValueError: if the images have another size.
        """
        side = self.config.scales[-1] * self.scale_factor
        height, width = images.shape[-2:]
        if (height, width) != (side, side):
            raise ValueError(
                f"images of {height}x{width} pixels do not fit this tokenizer: resize them to {side}x{side}"
            )
        latents = check_encoded(self.quant_conv(self.in_slices(self.encoder, images)).float())
        accumulated, codebook = torch.zeros_like(latents), self.code_vectors()
        codes = []
        for scale, p in enumerate(self.config.scales):
            residual = F.interpolate(latents - accumulated, size=(p, p), mode="area").permute(0, 2, 3, 1)
            codes.append(nearest_code(residual.flatten(0, 2), codebook).view(-1, p, p))
            accumulated = self.accumulate(scale, accumulated, self.lookup(codes[-1]))
        return codes

    def lookup(self, codes: torch.LongTensor) -> torch.Tensor:
        """The vectors [B, C, p, p] of codes [B, p, p] in float32."""
        return self.codebook(codes).permute(0, 3, 1, 2).float()

    def accumulate(self, scale: int, latents: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Add the code vectors [B, C, p, p] of `scale` to the latents [B, C, P, P] of the scales before it, in
        float32."""
        if vectors.shape != latents.shape:
            vectors = F.interpolate(vectors, size=latents.shape[-2:], mode="bicubic")
        return latents + self.phi[self.phi_index[scale]](vectors)

    @apply_forward_hook
    def latents(self, codes: list[torch.LongTensor]) -> torch.Tensor:
        """Latents [B, C, P, P] in float32 of the token maps of the first scales, or of all."""
        side = self.config.scales[-1]
        vectors = [self.lookup(token_map) for token_map in codes]
        accumulated = vectors[0].new_zeros(*vectors[0].shape[:2], side, side)
        for scale, added in enumerate(vectors):
            accumulated = self.accumulate(scale, accumulated, added)
        return accumulated

    @apply_forward_hook
    def decode(self, codes: list[torch.LongTensor]) -> torch.Tensor:
        """Images [B, 3, P * f, P * f] of token maps, one [B, p, p] per scale, nominally in [-1, 1], not clamped.

        The maps of the first scales alone give a coarser image.
        """
        return self.decode_latents(self.latents(codes))

    @apply_forward_hook
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, P * f, P * f] of latents [B, C, P, P], not clamped; in tiles if tiling is enabled.

        Tiles are smaller than the training images. For the 64x64 pixels of the packaged VAR, the PSNR between images
        decoded in tiles and at once is 35 dB with tiles of 48 pixels, and 28 dB with tiles of 32.
        """
        hidden = self.post_quant_conv(latents.to(self.dtype))
        return self.in_tiles(self.decoder, hidden, before=1, after=self.scale_factor)

    def scale_input(self, scale: tuple[int, int], latents: torch.Tensor) -> torch.Tensor:
        """The transformer's inputs [B, h * w, C] for a map of `scale` (rows, columns): the latents of the maps before
        it, averaged to its cells."""
        return F.interpolate(latents, size=scale, mode="area").flatten(2).transpose(1, 2)

    @apply_forward_hook
    def inputs(self, codes: list[torch.LongTensor]) -> torch.Tensor:
        """Teacher-forcing inputs [B, N - 1, C] in float32: `scale_input` of every scale but the first, N cells in
        total.

        The maps of the first k scales give the inputs of the k scales after the first.
        """
        codes = codes[: len(self.config.scales) - 1]
        accumulated = torch.zeros_like(self.latents(codes[:1]))
        inputs = []
        for scale, token_map in enumerate(codes):
            accumulated = self.accumulate(scale, accumulated, self.lookup(token_map))
            inputs.append(self.scale_input((self.config.scales[scale + 1],) * 2, accumulated))
        return torch.cat(inputs, dim=1)
