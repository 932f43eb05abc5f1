"""A small classifier of emoji. `arimage-emoji classifier` trains it, and the evaluation of emoji uses its features."""

import torch
from diffusers import ConfigMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from arimage.models.layers import GroupNorm
from arimage.models.mixin import ModelMixin


class EmojiClassifier(ModelMixin, ConfigMixin):
    """Classifies which emoji an image shows, in any style.

    Args:
        num_classes (`int`): the number of concepts.
        channels (`list[int]`): output channels of the four convolutions; those of the last are the features.
        norm_num_groups (`int`): number of groups of the group normalisation.
        image_size (`int`): side of the training images in pixels.
    """

    @register_to_config
    def __init__(
        self,
        num_classes: int = 1893,
        channels: tuple[int, ...] = (32, 64, 96, 96),
        norm_num_groups: int = 8,
        image_size: int = 64,
    ):
        super().__init__()
        layers, width = [], 3
        for channel, kernel_size, stride in zip(channels, (7, 3, 3, 3), (4, 2, 1, 2), strict=True):
            layers.append(nn.Conv2d(width, channel, kernel_size, stride, padding=kernel_size // 2))
            layers += [GroupNorm(norm_num_groups, channel), nn.SiLU()]
            width = channel
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Linear(width, num_classes)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, S, S] in [-1, 1] to features [B, D], the spatial means of the last convolution."""
        return self.convolutions(images).mean((2, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Images as in `features` to logits [B, num_classes]."""
        return self.head(self.features(images))
