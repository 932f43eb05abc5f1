"""The tokenizer of Infinity (https://arxiv.org/abs/2412.04431): an image as maps of bits, from coarse to fine."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook

from ...models.mixin import ModelMixin
from ...settings.schema import Count, Flag, Layers, Width, Widths, checked
from ...tokenizers.tiling import TilingMixin, check_encoded
from ...tokenizers.vq_llamagen import Decoder, Encoder


class InfinityVQModel(TilingMixin, ModelMixin, ConfigMixin):
    """Encodes images to maps of bits of growing size, each a correction of the sum of those before it, and decodes
    them: multi-scale residual quantisation to signs. The defaults are those of the tokenizer of the published
    Infinity-2B.

    A cell of a map has b = `bits` bits. Bit 1 stands for +1 / sqrt(C) in its channel of the latents, bit 0 for
    -1 / sqrt(C). With `patchify` a cell covers 2 x 2 cells of the latents. All between encoder and decoder is computed
    in float32, whatever the dtype of the model.

    Args:
        channels (`int`): width of the first convolution; every level has `channels` times its multiplier.
        channel_multipliers (`tuple[int, ...]`): one per level, from the image's resolution down to the latents'.
        layers_per_block (`int`): residual blocks per level in the encoder; the decoder has one more.
        latent_channels (`int`): the channels C of the latents.
        patchify (`bool`): a cell is 2 x 2 cells of the latents, and has 4 C bits instead of C.
        norm_num_groups (`int`): groups of every group norm.
    """

    _no_split_modules = ["ResBlock"]

    @register_to_config
    @checked
    def __init__(
        self,
        channels: Width = 128,
        channel_multipliers: Widths = (1, 2, 4, 4, 4),
        layers_per_block: Layers = 2,
        latent_channels: Width = 32,
        patchify: Flag = False,
        norm_num_groups: Count = 32,
    ):
        super().__init__()
        multipliers = list(channel_multipliers)
        shape = {"latent_channels": latent_channels, "num_groups": norm_num_groups, "attention": False}
        self.encoder = Encoder(channels, multipliers, layers_per_block, **shape)
        self.decoder = Decoder(channels, multipliers, layers_per_block + 1, **shape)
        self.patch = 2 if patchify else 1

    @property
    def bits(self) -> int:
        """The bits of a cell."""
        return self.config.latent_channels * self.patch**2

    @property
    def scale_factor(self) -> int:
        """Pixels per cell of the finest map along each side."""
        return self.patch * 2 ** (len(self.config.channel_multipliers) - 1)

    @apply_forward_hook
    def encode(self, images: torch.Tensor, scales: Sequence[tuple[int, int]]) -> list[torch.LongTensor]:
        """The bits [B, h, w, b] of the maps of `scales`, (rows, columns) from coarse to fine, of images [B, 3, H, W]
        in [-1, 1].

        Tiling does not apply: the coarse maps describe the image as a whole. Slicing does.

        Raises:
            ValueError: if the images are not of the size of the finest map.
        """
        size = tuple(side * self.scale_factor for side in scales[-1])
        if images.shape[-2:] != size:
            height, width = images.shape[-2:]
            raise ValueError(
                f"images of {height}x{width} pixels do not fit these scales: resize them to {size[0]}x{size[1]}"
            )
        latents = check_encoded(self.in_slices(self.encoder, images)).float()
        accumulated, maps = torch.zeros_like(latents), []
        for rows, columns in scales:
            grid = (rows * self.patch, columns * self.patch)
            residual = latents - accumulated
            if grid != latents.shape[-2:]:
                residual = F.interpolate(residual, size=grid, mode="area")
            residual = F.normalize(residual, dim=1)
            maps.append((F.pixel_unshuffle(residual, self.patch) > 0).long().permute(0, 2, 3, 1))
            accumulated = self.accumulate(accumulated, self.vectors(maps[-1]))
        return maps

    def vectors(self, bits: torch.LongTensor) -> torch.Tensor:
        """The vectors [B, C, h, w] of a map of bits [B, h, w, b] in float32; with `patchify` [B, C, 2 h, 2 w]."""
        signs = (2 * bits.float() - 1).permute(0, 3, 1, 2)
        return F.pixel_shuffle(signs, self.patch) / self.config.latent_channels**0.5

    def accumulate(self, latents: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Add the vectors [B, C, h, w] of a map to the latents [B, C, H, W] of the maps before it, in float32."""
        if vectors.shape != latents.shape:
            vectors = F.interpolate(vectors, size=latents.shape[-2:], mode="bilinear")
        return latents + vectors

    def empty_latents(self, count: int, finest: tuple[int, int], device: torch.device) -> torch.Tensor:
        """Latents [B, C, H, W] in float32 before the first map, of images whose finest map is `finest`."""
        rows, columns = (side * self.patch for side in finest)
        return torch.zeros(count, self.config.latent_channels, rows, columns, device=device, dtype=torch.float32)

    def scale_input(self, scale: tuple[int, int], latents: torch.Tensor) -> torch.Tensor:
        """The transformer's inputs [B, h * w, b] for a map of `scale`: the latents of the maps before it."""
        grid = [side * self.patch for side in scale]
        resized = F.interpolate(latents, size=grid, mode="bilinear") if grid != [*latents.shape[-2:]] else latents
        return F.pixel_unshuffle(resized, self.patch).flatten(2).transpose(1, 2)

    @apply_forward_hook
    def latents(self, maps: Sequence[torch.LongTensor], finest: tuple[int, int]) -> torch.Tensor:
        """Latents [B, C, H, W] in float32 of the maps [B, h, w, b] of the first scales, or of all, of images whose
        finest map is `finest`."""
        accumulated = self.empty_latents(len(maps[0]), finest, maps[0].device)
        for bits in maps:
            accumulated = self.accumulate(accumulated, self.vectors(bits))
        return accumulated

    @apply_forward_hook
    def decode(self, maps: Sequence[torch.LongTensor], finest: tuple[int, int] | None = None) -> torch.Tensor:
        """Images [B, 3, H, W] of maps of bits [B, h, w, b], nominally in [-1, 1], not clamped.

        The maps of the first scales alone give a coarser image; `finest` is then the shape of the finest map.
        """
        return self.decode_latents(self.latents(maps, finest or (maps[-1].shape[1], maps[-1].shape[2])))

    @apply_forward_hook
    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] of latents [B, C, h, w], not clamped; in tiles if tiling is enabled."""
        return self.in_tiles(self.decoder, latents.to(self.dtype), before=self.patch, after=self.scale_factor)

    @apply_forward_hook
    def inputs(self, maps: Sequence[torch.LongTensor]) -> torch.Tensor:
        """Teacher-forcing inputs [B, N, b] in float32: `scale_input` of every map but the first, N cells in total."""
        scales = [(bits.shape[1], bits.shape[2]) for bits in maps]
        accumulated, inputs = self.empty_latents(len(maps[0]), scales[-1], maps[0].device), []
        for bits, following in zip(maps, scales[1:], strict=False):
            accumulated = self.accumulate(accumulated, self.vectors(bits))
            inputs.append(self.scale_input(following, accumulated))
        return torch.cat(inputs, dim=1)
