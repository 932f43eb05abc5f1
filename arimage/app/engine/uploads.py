"""Uploaded images: read within limits, and reduced to what a model needs before a request waits."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import IO, Any

from PIL import Image

from ...media.files import open_image, to_mask, to_rgb, to_rgba
from ...pipelines.pictures.images import resize_image
from .models import ModelInfo
from .types import Limits, Refused, Request


# References are reduced to this multiple of the pixels of the largest size of the model, but not below
# `REFERENCE_PIXELS`: pipelines resize them to about one time.
REFERENCE_AREAS, REFERENCE_PIXELS = 4, 2**20


def check_pixels(name: str, upload: Image.Image, limits: Limits) -> None:
    """Refuse an image that is too large, without reading its pixels.

    Raises:
        Refused: with the reason.
    """
    if upload.width * upload.height > limits.pixels:
        size = f"{upload.width}x{upload.height}"
        raise Refused(f"{name} has {size} pixels: give one of at most {limits.pixels} pixels", name)


def read_upload(name: str, file: IO[bytes], limits: Limits) -> Image.Image:
    """An uploaded image, in mode RGBA and upright.

    Raises:
        Refused: if it is not a whole PNG, JPEG or WebP file, or is too large.
    """
    try:
        upload = open_image(name, file, ["png", "jpeg", "webp"])
        check_pixels(name, upload, limits)
        return to_rgba(name, upload)
    except Refused:
        raise
    except ValueError as error:
        raise Refused(f"{name} cannot be read as an image: send a whole PNG, JPEG or WebP file", name) from error


def reduce_uploads(
    request: Request, info: ModelInfo, references: Sequence[Callable[[], Image.Image]] | None = None
) -> Request:
    """The request with its images in the modes and sizes that the model needs, so that it does not hold photos while
    it waits.

    Args:
        references: functions that read the reference images, called one after another; by default those of the
            request.

    Raises:
        Refused: if an image cannot be used, or the mask has another size than the image.
    """
    read = references if references is not None else [lambda one=one: one for one in request.references]
    most = max(REFERENCE_PIXELS, REFERENCE_AREAS * max(height * width for height, width in info.sizes))
    reduced = tuple(_within(_used("image", to_rgb, one()), most) for one in read)
    request = replace(request, references=reduced)
    image, mask = request.image, request.mask_image
    if image is None or mask is None:
        return request
    image, mask = _used("image", to_rgb, image), _used("mask_image", to_mask, mask)
    if mask.size != image.size:
        raise Refused(
            f"mask_image has {mask.width}x{mask.height} pixels and image {image.width}x{image.height}: "
            "give a mask of the size of the image",
            "mask_image",
        )
    default = default_size(request, info)
    size = asked_size(request, default)
    # Another size is refused with the request.
    if size in info.sizes:
        image, mask = resize_image(image, mask, size)
    return replace(request, image=image, mask_image=mask)


def asked_size(request: Any, default: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a `Request` or `VideoRequest`."""
    height = default[0] if request.height is None else request.height
    return height, default[1] if request.width is None else request.width


def default_size(request: Request, info: ModelInfo) -> tuple[int, int]:
    """Height and width of the images of a request that does not say: the first size, or with references the one whose
    ratio is nearest to that of the last."""
    if not request.references or request.image is not None:
        return info.sizes[0]
    width, height = request.references[-1].size
    return min(info.sizes, key=lambda size: abs(math.log(size[0] / size[1] * width / height)))


def _used(name: str, read: Callable[[str, Image.Image], Image.Image], image: Image.Image) -> Image.Image:
    try:
        return read(name, image)
    except ValueError as error:
        raise Refused(str(error), name) from error


def _within(image: Image.Image, most: int) -> Image.Image:
    share = math.sqrt(most / (image.width * image.height))
    if share >= 1:
        return image
    width, height = (max(1, round(side * share)) for side in image.size)
    return image.resize((width, height), Image.Resampling.LANCZOS)
