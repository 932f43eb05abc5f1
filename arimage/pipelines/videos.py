"""Images and videos that a video begins with, on their way into a pipeline."""

import math
from typing import Any

import numpy as np
import torch
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from torchvision.transforms import functional as vision


def prepare_images(image: PipelineImageInput, size: tuple[int, int]) -> torch.Tensor:
    """Images as videos of one frame [B, 3, 1, H, W], float32 in [-1, 1], see `prepare_frames`.

    Raises:
        ValueError: if they cannot be used.
    """
    several = isinstance(image, list | tuple) or getattr(image, "ndim", 0) == 4
    images = list(image) if several else [image]
    return torch.stack([prepare_frames("image", [part], size) for part in images]) if images else _refuse("image")


def prepare_videos(video: Any, size: tuple[int, int]) -> list[torch.Tensor]:
    """Videos [3, T, H, W], float32 in [-1, 1], see `prepare_frames`.

    Args:
        video: one video or several: lists of frames, or arrays and tensors as in diffusers, [T, H, W, 3] and [T, 3, H,
            W] in [0, 1], with a dimension in front for several.

    Raises:
        ValueError: if they cannot be used.
    """
    if isinstance(video, np.ndarray | torch.Tensor):
        videos = list(video) if video.ndim == 5 else [video]
    elif isinstance(video, list | tuple) and len(video):
        first = video[0]
        several = isinstance(first, list | tuple) or getattr(first, "ndim", 0) == 4
        videos = list(video) if several else [list(video)]
    else:
        videos = []
    return [prepare_frames("video", frames, size) for frames in videos] if videos else _refuse("video")


def prepare_frames(name: str, frames: Any, size: tuple[int, int]) -> torch.Tensor:
    """Frames [3, T, H, W], float32 in [-1, 1]: resized until they cover `size` (height, width), and cropped around
    their centre."""
    if len(frames) == 0:
        _refuse(name)
    try:
        pixels = VaeImageProcessor(vae_scale_factor=1, do_convert_rgb=True).preprocess(frames)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"{name} cannot be used ({error}): give PIL images, arrays or tensors") from error
    # Not a number is refused by the comparison, too.
    if pixels.shape[1] != 3 or not pixels.is_floating_point() or not pixels.abs().max() <= 1:
        raise ValueError(f"{name} is not RGB in [0, 1]: give PIL images, or arrays of floats from 0 to 1")
    scale = max(wanted / given for wanted, given in zip(size, pixels.shape[2:], strict=True))
    covering = [math.ceil(scale * given) for given in pixels.shape[2:]]
    return vision.center_crop(vision.resize(pixels.float(), covering, antialias=True), list(size)).movedim(1, 0)


def _refuse(name: str):
    raise ValueError(f"{name} is empty: give PIL images, arrays or tensors")
