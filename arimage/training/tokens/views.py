"""The views of an image, or of a frame, that tokens are made of: crops and mirrored crops, as the papers take them."""

from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.functional import five_crop

from ...media.limits import long_cropped


Views = Literal["centre", "centre-flip", "ten-crop"]
COUNTS: dict[str, int] = {"centre": 1, "centre-flip": 2, "ten-crop": 10}
# How much larger an image is than the ten crops of it (LlamaGen, https://arxiv.org/abs/2406.06525).
TEN_CROP = 1.1


def count_views(about: dict[str, Any]) -> int:
    """How many views of each image a cache has, by its `About`."""
    return about["augmentation"]["copies"] if "augmentation" in about else COUNTS[about["views"]]


def centre_crop(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The middle of an image in `size` (height, width) pixels: halved by averages while it is twice as large, then
    bicubic (ADM, https://arxiv.org/abs/2105.05233)."""
    height, width = size
    image = long_cropped(image, size)
    while image.height >= 2 * height and image.width >= 2 * width:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(height / image.height, width / image.width)
    covering = max(round(image.width * scale), width), max(round(image.height * scale), height)
    image = image.resize(covering, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def views_of(image: Image.Image, size: tuple[int, int], views: Views) -> torch.Tensor:
    """The views of an image in mode RGB, uint8 [V, 3, H, W]: the middle, the middle and its mirror image, or the four
    corners and the middle of a slightly larger one with their mirror images."""
    if views == "ten-crop":
        parts = list(five_crop(centre_crop(image, (int(size[0] * TEN_CROP), int(size[1] * TEN_CROP))), list(size)))
    else:
        parts = [centre_crop(image, size)]
    pixels = torch.stack([torch.from_numpy(np.array(part)).permute(2, 0, 1) for part in parts])
    return pixels if views == "centre" else torch.cat([pixels, pixels.flip(3)])
