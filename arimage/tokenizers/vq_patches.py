"""An image tokenizer without a network: every patch of pixels becomes the nearest patch of a codebook."""

from typing import Literal

import torch
import torch.nn.functional as F
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

from ..kernels.codebook import nearest_code
from ..models.mixin import ModelMixin
from ..settings.schema import Count, checked
from .tiling import TilingMixin, check_sides
from .vq_llamagen import vectors_of


class PatchVQModel(TilingMixin, ModelMixin, ConfigMixin):
    """Encodes images to grids of codes and decodes them by look-up: code v is the patch of pixels in row v of the
    codebook, as k-means finds them.

    For images of few colours, such as icons, a codebook of patches is as good as a network and decodes in no time. No
    patch depends on another, so tiling changes no result.

    Args:
        patch_size (`int`): pixels per code along each side.
        codebook_size (`int`): patches in the codebook.
        channels (`int`): 3 for colours, 1 for grey patches. Images have three channels in either case.
    """

    @register_to_config
    @checked
    def __init__(self, patch_size: Count = 4, codebook_size: Count = 512, channels: Literal[1, 3] = 3):
        super().__init__()
        self.codebook = nn.Embedding(codebook_size, channels * patch_size**2)

    @property
    def scale_factor(self) -> int:
        """Pixels per code along each side."""
        return self.config.patch_size

    def code_vectors(self) -> torch.Tensor:
        """The patches of all codes [V, channels * patch_size ** 2], in [-1, 1]."""
        return vectors_of(self.codebook)

    def to_patches(self, images: torch.Tensor) -> torch.Tensor:
        """The patches [B, H / f, W / f, channels * f * f] of images [B, 3, H, W], f = `scale_factor`.

        Raises:
            ValueError: if a side of the images is not divisible by `scale_factor`.
        """
        check_sides(images, self.scale_factor)
        if self.config.channels == 1:
            images = images.mean(1, keepdim=True)
        return F.pixel_unshuffle(images, self.scale_factor).permute(0, 2, 3, 1)

    @apply_forward_hook
    def encode(self, images: torch.Tensor) -> torch.LongTensor:
        """Codes [B, H / f, W / f] of images [B, 3, H, W] in [-1, 1] whose sides are divisible by f = `scale_factor`.

        Raises:
            ValueError: if a side of the images is not divisible by `scale_factor`.
        """
        codebook = self.code_vectors()

        def nearest(images: torch.Tensor) -> torch.Tensor:
            patches = self.to_patches(images)
            return nearest_code(patches.flatten(0, 2), codebook).view(patches.shape[:-1])

        return self.in_slices(nearest, images)

    @apply_forward_hook
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """Images [B, 3, h * f, w * f] of codes [B, h, w], in [-1, 1]."""
        return self.in_slices(self._decode, codes)

    def _decode(self, codes: torch.LongTensor) -> torch.Tensor:
        patches = self.codebook(codes).permute(0, 3, 1, 2)
        return F.pixel_shuffle(patches, self.scale_factor).expand(-1, 3, -1, -1)
