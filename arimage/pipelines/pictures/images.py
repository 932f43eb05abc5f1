"""Preparation of input images, and conversion of output images."""

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from PIL import Image

from ...media.files import nothing_selected, to_mask, to_rgb


def prepare_image(
    image: PipelineImageInput | None, mask_image: PipelineImageInput | None, size: tuple[int, int], count: int
) -> tuple[torch.Tensor, torch.BoolTensor]:
    """The images to edit in a call with `count` prompts or classes, resized to `size` (height, width), and their
    masks.

    Args:
        image: see `to_pixels`.
        mask_image: PIL images, see `media.files.to_mask`; or masks [H, W] or [B, H, W] (tensors also [B, 1, H, W],
            arrays also [B, H, W, 1]) of booleans, labels 0 and 1, floats in [0, 1], or levels in uint8 or uint16.

    Returns:
        The images, float32 [count, 3, H, W] in [-1, 1], and where to generate them again, bool [count, 1, H, W].
    """
    if image is None or mask_image is None:
        raise ValueError("image and mask_image belong together: give both, or neither")
    pixels, masks = to_pixels("image", image, size), _to_masks("mask_image", mask_image, size)
    for name, values, colours in (("image", pixels, ""), ("mask_image", masks, ", without colours")):
        if len(values) not in (1, count):
            raise ValueError(
                f"{name} holds {len(values)} images for {count} prompts or classes: give one for all, or one for each"
                + colours
            )
    if not masks.flatten(1).any(1).all():
        raise ValueError(nothing_selected("mask_image"))
    return pixels.expand(count, -1, -1, -1), masks.expand(count, -1, -1, -1)


def resize_image(
    image: Image.Image, mask_image: Image.Image, size: tuple[int, int]
) -> tuple[Image.Image, Image.Image]:
    """An image (RGB) and a mask (L) resized to `size` (height, width) as in `prepare_image`, which then leaves them as
    they are."""
    (height, width), resample = size, Image.Resampling.LANCZOS
    mask_image = mask_image.resize((width, height), resample)
    return image.resize((width, height), resample), mask_image.point([255 * (level >= 128) for level in range(256)])


def to_pixels(name: str, image: PipelineImageInput, size: tuple[int, int] | None = None) -> torch.Tensor:
    """Images as float32 [B, 3, H, W] in [-1, 1], resized to `size` (height, width) if it is given, all of them by
    PIL's Lanczos filter.

    Args:
        name: the name of the argument, for error messages.
        image: PIL images, see `media.files.to_rgb`; or floats in [0, 1], as arrays [H, W, 3] or [B, H, W, 3] or as
            tensors [3, H, W] or [B, 3, H, W].
    """
    parts = [to_rgb(name, part) if isinstance(part, Image.Image) else part for part in parts_of(name, image)]
    pictures = [isinstance(part, Image.Image) for part in parts]
    if any(pictures) and not all(pictures):
        raise ValueError(f"{name} holds PIL images and others: give one kind")
    if size is None or any(pictures):
        return _pixels_of(name, parts, size)
    # diffusers resizes arrays and tensors by the nearest pixel.
    return torch.cat([resize_values(_pixels_of(name, [part]), size, lowest=-1) for part in parts])


def _pixels_of(name: str, parts: list, size: tuple[int, int] | None = None) -> torch.Tensor:
    outside = any(isinstance(part, np.ndarray | torch.Tensor) and not _is_float(part) for part in parts)
    try:
        # A list of batches is deprecated in diffusers.
        given = parts[0] if len(parts) == 1 else parts
        pixels = None if outside else VaeImageProcessor(vae_scale_factor=1).preprocess(given, *(size or ()))
    except (ValueError, RuntimeError, TypeError, IndexError) as error:
        raise ValueError(f"{name} cannot be used ({error}): give PIL images, arrays or tensors") from error
    # Not a number is refused by the comparison, too.
    if pixels is None or not pixels.abs().max() <= 1:
        raise ValueError(f"{name} has values outside [0, 1]: give PIL images, or arrays of floats from 0 to 1")
    if pixels.shape[1] != 3:
        _refuse_channels(name, pixels.shape[1], 3)
    return pixels.float()


def resize_values(values: torch.Tensor, size: tuple[int, int], lowest: float) -> torch.Tensor:
    """Floats [B, C, H, W] from `lowest` to 1, resized to `size` (height, width) as PIL resizes images: by its Lanczos
    filter along rows, then along columns, each time cut to this range. They are not rounded to 256 levels."""
    height, width = size
    if values.shape[2:] == size:
        return values

    def along(plane: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        return np.asarray(Image.fromarray(plane).resize(size, Image.Resampling.LANCZOS)).clip(lowest, 1)

    planes = values.float().cpu().flatten(0, 1).numpy()
    resized = np.stack([along(along(plane, (width, len(plane))), (width, height)) for plane in planes])
    return torch.from_numpy(resized).unflatten(0, values.shape[:2]).to(values)


def _to_masks(name: str, mask_image: PipelineImageInput, size: tuple[int, int]) -> torch.Tensor:
    height, width = size
    masks = []
    for part in parts_of(name, mask_image):
        if isinstance(part, Image.Image):
            levels = to_mask(name, part).resize((width, height), Image.Resampling.LANCZOS)
            masks.append(torch.from_numpy(np.asarray(levels) / np.float32(255))[None, None])
        elif isinstance(part, np.ndarray | torch.Tensor):
            given = [_unit_range(name, mask) for mask in _single_masks(name, part)]
            masks += [resize_values(mask[None, None], size, lowest=0).cpu() for mask in given]
        else:
            raise ValueError(f"{name} cannot be used ({type(part).__name__}): give PIL images, arrays or tensors")
    # A half may be rounded down.
    return torch.cat(masks) > 0.499


def _single_masks(name: str, masks: np.ndarray | torch.Tensor) -> list:
    """The masks [H, W] in an array or a tensor."""
    if masks.ndim not in (2, 3, 4):
        raise ValueError(f"{name} has the shape {list(masks.shape)}: give masks [H, W] or [B, H, W]")
    if masks.ndim == 4:
        axis = 1 if isinstance(masks, torch.Tensor) else 3
        if masks.shape[axis] != 1:
            _refuse_channels(name, masks.shape[axis], 1)
        masks = masks.squeeze(axis)
    elif masks.ndim == 3 and masks.shape[2] <= 4:
        # The colours come last; otherwise the first axis counts masks.
        if masks.shape[2] != 1:
            _refuse_channels(name, masks.shape[2], 1)
        masks = masks[..., 0]
    return list(masks) if masks.ndim == 3 else [masks]


def _unit_range(name: str, mask: np.ndarray | torch.Tensor) -> torch.Tensor:
    """A mask as floats in [0, 1]. Integers are labels 0 and 1, or levels of 8 or 16 bits."""
    values = torch.from_numpy(mask.astype(np.float32)) if isinstance(mask, np.ndarray) else mask.float()
    # ">u2" is big-endian.
    levels = 65535 if str(mask.dtype) in ("uint16", ">u2", "torch.uint16") else 255
    most = 1 if _is_float(mask) or values.max() <= 1 else levels
    # Not a number is refused by the comparison, too.
    if not (values.min() >= 0 and values.max() <= most):
        raise ValueError(f"{name} has values outside [0, 1]: give PIL images, or arrays of floats from 0 to 1")
    return values / most


def _is_float(values: np.ndarray | torch.Tensor) -> bool:
    return "float" in str(values.dtype)


def _refuse_channels(name: str, found: int, expected: int):
    raise ValueError(f"{name} has {found} channels where {expected} are expected: convert it")


def parts_of(name: str, image: PipelineImageInput) -> list:
    """One image or several as a list."""
    parts = list(image) if isinstance(image, list | tuple) else [image]
    if len(parts) == 0 or any(0 in getattr(part, "shape", getattr(part, "size", ())) for part in parts):
        raise ValueError(f"{name} is empty: give one image for all prompts, or one for each")
    return parts


def known_tokens(tokens: torch.LongTensor, repaint: torch.BoolTensor) -> torch.LongTensor:
    """The tokens [B, N] of given images from tokens [B, h, w], but -1 where any pixel of a token is in `repaint`
    [B, 1, H, W]."""
    generated = F.max_pool2d(repaint.float(), repaint.shape[-1] // tokens.shape[-1])[:, 0] > 0
    return torch.where(generated, -1, tokens).flatten(1)


def round_levels_down(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels in [-1, 1] on the 256 levels of 8-bit images, rounded down."""
    return ((pixels.clamp(-1, 1) + 1) * 127.5).floor() / 127.5 - 1
