"""An image tokenizer for videos: every frame becomes a token map."""

from typing import Self

import torch
from diffusers import ConfigMixin  # noqa: F401 diffusers looks for the base classes here
from diffusers.utils.accelerate_utils import apply_forward_hook

from ..models.mixin import ModelMixin  # noqa: F401
from .vq_llamagen import LlamaGenVQModel


class FramewiseVQModel(LlamaGenVQModel):
    """A `LlamaGenVQModel` for videos, frame by frame: T frames are T maps, and no frame depends on another. Weights
    and settings are those of the image tokenizer."""

    @property
    def codebook_size(self) -> int:
        """How many tokens there are."""
        return self.config.codebook_size

    def num_maps(self, frames: int) -> int:
        """How many maps a video of `frames` frames has: `frames`.

        Raises:
            ValueError: if there are no frames.
        """
        if frames < 1:
            raise ValueError(f"{frames} frames do not fit this tokenizer: give 1, 2, 3, ...")
        return frames

    def num_frames(self, maps: int) -> int:
        """How many frames `maps` maps have: `maps`."""
        return maps

    @apply_forward_hook
    def encode(self, video: torch.Tensor) -> torch.LongTensor:
        """Tokens [B, T, H / f, W / f] of videos [B, 3, T, H, W] in [-1, 1] whose sides are divisible by f =
        `scale_factor`.

        Raises:
            ValueError: if a side is not divisible by `scale_factor`.
        """
        return super().encode(video.transpose(1, 2).flatten(0, 1)).unflatten(0, (len(video), -1))

    @apply_forward_hook
    def decode(self, codes: torch.LongTensor) -> torch.Tensor:
        """Videos [B, 3, T, h * f, w * f] of tokens [B, T, h, w], nominally in [-1, 1], not clamped."""
        return super().decode(codes.flatten(0, 1)).unflatten(0, (len(codes), -1)).transpose(1, 2)

    def stream(self) -> Self:
        """A decoder for maps that are generated one after another: this tokenizer, since maps do not depend on each
        other."""
        return self
