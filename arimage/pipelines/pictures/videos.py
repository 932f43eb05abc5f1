"""Preparation of the images and videos that a generated video continues."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from PIL import Image

from ...media.limits import shown_part
from .images import to_pixels


def cover(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize images [B, 3, H, W] to cover `size` (height, width), and crop them around the centre."""
    # Not with the module, since a video that begins with a text needs none of it.
    from torchvision.transforms import functional as vision

    pixels = _shown(pixels, size)
    scale = max(wanted / given for wanted, given in zip(size, pixels.shape[2:], strict=True))
    covering = [math.ceil(scale * given) for given in pixels.shape[2:]]
    return vision.center_crop(vision.resize(pixels, covering, antialias=True), list(size))


def cover_levels(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """`cover` with PIL's Lanczos filter, on the 256 levels of PIL images, as the authors of some models do. Images
    that have the size are not changed."""
    pixels = _shown(pixels, size)
    height, width = pixels.shape[2:]
    if (height, width) == size:
        return pixels
    from torchvision.transforms import functional as vision

    ratio = width / height
    if ratio <= size[1] / size[0]:
        covering = max(int(size[1] / ratio), size[0]), size[1]
    else:
        covering = size[0], max(int(ratio * size[0]), size[1])
    top, left = ((given - wanted) // 2 for given, wanted in zip(covering, size, strict=True))
    found = []
    for image in VaeImageProcessor.numpy_to_pil(VaeImageProcessor.pt_to_numpy(pixels / 2 + 0.5)):
        resized = image.resize(covering[::-1], Image.Resampling.LANCZOS)
        found.append(vision.to_tensor(resized.crop((left, top, left + size[1], top + size[0]))) * 2 - 1)
    return torch.stack(found)


def _shown(pixels: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    rows, columns = shown_part((pixels.shape[2], pixels.shape[3]), size)
    return pixels[:, :, rows, columns]


def prepare_images(
    image: PipelineImageInput, size: tuple[int, int], fit: Callable[..., torch.Tensor] = cover
) -> torch.Tensor:
    """Convert images to videos of one frame [B, 3, 1, H, W], float32 in [-1, 1]; see `prepare_frames`."""
    several = isinstance(image, list | tuple) or getattr(image, "ndim", 0) == 4
    images = list(image) if several else [image]
    if not images:
        _refuse("image")
    # A part of a list may be a batch.
    return torch.cat([prepare_frames("image", [part], size, fit).movedim(1, 0) for part in images])[:, :, None]


def prepare_videos(
    video: Any, size: tuple[int, int], last: int = 0, fit: Callable[..., torch.Tensor] = cover
) -> list[torch.Tensor]:
    """Convert one video or several (lists of frames, or arrays [T, H, W, 3] and tensors [T, 3, H, W] in [0, 1], with a
    dimension in front for several) to a list of [3, T, H, W], float32 in [-1, 1]; see `prepare_frames`. Keeps the
    `last` frames of each; 0 keeps all."""
    if isinstance(video, np.ndarray | torch.Tensor):
        videos = list(video) if video.ndim == 5 else [video if video.ndim == 4 else [video]]
    elif isinstance(video, list | tuple) and len(video):
        first = video[0]
        several = isinstance(first, list | tuple) or getattr(first, "ndim", 0) == 4
        videos = list(video) if several else [list(video)]
    else:
        videos = []
    if not videos:
        _refuse("video")
    return [prepare_frames("video", frames[-last:], size, fit) for frames in videos]


def prepare_frames(
    name: str, frames: Any, size: tuple[int, int], fit: Callable[..., torch.Tensor] = cover
) -> torch.Tensor:
    """Convert frames (see `to_pixels`) to [3, T, H, W], float32 in [-1, 1], resized to cover `size` (height, width)
    and cropped around the centre by `fit`: `cover` or `cover_levels`."""
    if len(frames) == 0:
        _refuse(name)
    return fit(to_pixels(name, frames), size).movedim(1, 0)


def _refuse(name: str):
    raise ValueError(f"{name} is empty or of an unknown kind: give PIL images, arrays or tensors")
