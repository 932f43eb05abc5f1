"""The views of an image that tokens are made of: crops and mirrored crops, as the papers take them."""

from typing import Literal

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.functional import five_crop


Views = Literal["centre", "centre-flip", "ten-crop"]
COUNTS: dict[str, int] = {"centre": 1, "centre-flip": 2, "ten-crop": 10}
# How much larger an image is than the ten crops of it (LlamaGen, https://arxiv.org/abs/2406.06525).
TEN_CROP = 1.1


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """The square in the middle of an image in `size` x `size` pixels: halved by averages while it is twice as large,
    then bicubic (ADM, https://arxiv.org/abs/2105.05233)."""
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    width, height = (max(round(side * scale), size) for side in image.size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - size) // 2, (height - size) // 2
    return image.crop((left, top, left + size, top + size))


def views_of(image: Image.Image, size: int, views: Views) -> torch.Tensor:
    """The views of an image in mode RGB, uint8 [V, 3, S, S]: the middle, the middle and its mirror image, or the four
    corners and the middle of a slightly larger one with their mirror images."""
    if views == "ten-crop":
        parts = list(five_crop(centre_crop(image, int(size * TEN_CROP)), [size, size]))
    else:
        parts = [centre_crop(image, size)]
    pixels = torch.stack([torch.from_numpy(np.array(part)).permute(2, 0, 1) for part in parts])
    return pixels if views == "centre" else torch.cat([pixels, pixels.flip(3)])
