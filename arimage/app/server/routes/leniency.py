"""What a lenient server does with requests that it would refuse, for programs whose requests cannot be changed."""

import dataclasses
import math

from PIL import Image, ImageChops

from ...engine.models import ModelInfo
from ...engine.types import Limits, Request


# Ratios that differ by this share are one shape: sizes are multiples of 8 or 16 pixels.
SAME_SHAPE = 0.01


def whole_mask(image: Image.Image) -> Image.Image | None:
    """The mask of an edit without one, white everywhere, if `image` (RGBA) is opaque."""
    opaque = ImageChops.invert(image.getchannel("A")).getbbox() is None
    return Image.new("L", image.size, 255) if opaque else None


def adapt(request: Request, info: ModelInfo, limits: Limits) -> tuple[Request, list[str]]:
    """The request that is generated instead, and the fields of it that are ignored: without a negative prompt that the
    model does not take, of at most as many images as the limit, and of the nearest size that the model has."""
    ignored = []
    if request.negative_prompt is not None and not info.negative_prompt:
        request = dataclasses.replace(request, negative_prompt=None)
        ignored.append("negative_prompt")
    if request.count > limits.images:
        request = dataclasses.replace(request, count=limits.images)
        ignored.append("n")
    if request.height is not None and request.width is not None:
        height, width = nearest_size((request.height, request.width), info.sizes)
        request = dataclasses.replace(request, height=height, width=width)
    return request, ignored


def nearest_size(asked: tuple[int, int], sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """The one of `sizes`, (height, width), whose shape is nearest, and among those of one shape the one whose area
    is."""

    def shape(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] / size[1] * asked[1] / asked[0]))

    def area(size: tuple[int, int]) -> float:
        return abs(math.log(size[0] * size[1] / (asked[0] * asked[1])))

    nearest = min(map(shape, sizes))
    return min(
        (size for size in sizes if shape(size) <= nearest + SAME_SHAPE), key=lambda size: (area(size), shape(size))
    )
