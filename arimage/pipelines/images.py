"""Images on their way into a pipeline and out of it."""

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor


def prepare_image(
    image: PipelineImageInput | None,
    mask_image: PipelineImageInput | None,
    size: tuple[int, int],
    count: int,
) -> tuple[torch.Tensor, torch.BoolTensor]:
    """The images to change in a call with `count` prompts or classes, resized to `size` (height, width), and their
    masks.

    Returns:
        float32 [count, 3, H, W] in [-1, 1], and where they are generated again, bool [count, 1, H, W].

    Raises:
        ValueError: if one of the two is missing, or they are not images, one for all prompts or one per prompt.
    """
    if image is None or mask_image is None:
        raise ValueError("image and mask_image belong together: give both, or neither")
    if isinstance(mask_image, np.ndarray | torch.Tensor):
        # A mask may be boolean.
        mask_image = mask_image * 1.0
    to_mask = VaeImageProcessor(vae_scale_factor=1, do_normalize=False, do_binarize=True, do_convert_grayscale=True)
    to_pixels = VaeImageProcessor(vae_scale_factor=1, do_convert_rgb=True)
    masks = _preprocess(to_mask, "mask_image", mask_image, size)
    pixels = _preprocess(to_pixels, "image", image, size)
    # Not a number is refused by the comparison, too.
    if not pixels.is_floating_point() or not pixels.abs().max() <= 1:
        raise ValueError("image has values outside [0, 1]: give PIL images, or arrays of floats from 0 to 1")
    if not masks.isfinite().all():
        raise ValueError("mask_image has values that are not finite: give PIL images, or arrays of floats from 0 to 1")
    for name, values, channels in (("image", pixels, 3), ("mask_image", masks, 1)):
        if values.shape[1] != channels:
            raise ValueError(f"{name} has {values.shape[1]} channels where {channels} are expected: convert it")
        if len(values) not in (1, count):
            raise ValueError(
                f"{name} holds {len(values)} images for {count} prompts or classes: give one for all, or one for each"
            )
    return tuple(values.expand(count, -1, -1, -1) for values in (pixels.float(), masks.bool()))


def _preprocess(
    processor: VaeImageProcessor, name: str, image: PipelineImageInput, size: tuple[int, int]
) -> torch.Tensor:
    parts = image if isinstance(image, list | tuple) else [image]
    if len(parts) == 0 or any(0 in getattr(part, "shape", ()) for part in parts):
        raise ValueError(f"{name} is empty: give one image for all prompts, or one for each")
    try:
        return processor.preprocess(image, *size)
    except ValueError as error:
        raise ValueError(f"{name} cannot be used ({error}): give PIL images, arrays or tensors") from error


def known_tokens(tokens: torch.LongTensor, repaint: torch.BoolTensor) -> torch.LongTensor:
    """The tokens [B, N] of given images from tokens [B, h, w], but -1 where any pixel of a token is in `repaint`
    [B, 1, H, W]."""
    generated = F.max_pool2d(repaint.float(), repaint.shape[-1] // tokens.shape[-1])[:, 0] > 0
    return torch.where(generated, -1, tokens).flatten(1)


def round_levels_down(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in [-1, 1] on the 256 levels of 8-bit images, rounded down."""
    return ((pixels.clamp(-1, 1) + 1) * 127.5).floor() / 127.5 - 1
