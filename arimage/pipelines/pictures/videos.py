"""Preparation of the images and videos that a generated video continues."""

import math
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import PipelineImageInput
from torchvision.transforms import functional as vision

from .images import to_pixels


def prepare_images(image: PipelineImageInput, size: tuple[int, int]) -> torch.Tensor:
    """Convert images to videos of one frame [B, 3, 1, H, W], float32 in [-1, 1]; see `prepare_frames`.

    Raises:
        ValueError: if they cannot be used.
    """
    several = isinstance(image, list | tuple) or getattr(image, "ndim", 0) == 4
    images = list(image) if several else [image]
    return torch.stack([prepare_frames("image", [part], size) for part in images]) if images else _refuse("image")


def prepare_videos(video: Any, size: tuple[int, int], last: int = 0) -> list[torch.Tensor]:
    """Convert videos to a list of [3, T, H, W], float32 in [-1, 1]; see `prepare_frames`.

    Args:
        video: one video or several: lists of frames, or arrays and tensors as in diffusers, [T, H, W, 3] and
            [T, 3, H, W] in [0, 1], with a dimension in front for several.
        last: keep only this many frames at the end of each video; 0 keeps all.

    Raises:
        ValueError: if they cannot be used.
    """
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
    return [prepare_frames("video", frames[-last:], size) for frames in videos]


def prepare_frames(name: str, frames: Any, size: tuple[int, int]) -> torch.Tensor:
    """Convert frames (see `to_pixels`) to [3, T, H, W], float32 in [-1, 1], resized to cover `size` (height, width)
    and cropped around the centre."""
    if len(frames) == 0:
        _refuse(name)
    pixels = to_pixels(name, frames)
    scale = max(wanted / given for wanted, given in zip(size, pixels.shape[2:], strict=True))
    covering = [math.ceil(scale * given) for given in pixels.shape[2:]]
    return vision.center_crop(vision.resize(pixels, covering, antialias=True), list(size)).movedim(1, 0)


def _refuse(name: str):
    raise ValueError(f"{name} is empty or of an unknown kind: give PIL images, arrays or tensors")
