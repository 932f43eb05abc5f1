"""What a lenient server does with requests that it would refuse, for programs whose requests cannot be changed."""

import dataclasses
import math

from PIL import Image, ImageChops

from ..engine.models import ModelInfo
from ..engine.types import Limits, Request


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
    """The nearest of `sizes`, (height, width). Distances are between logarithms of height and width, so that aspect
    ratio and area count equally."""
    return min(sizes, key=lambda size: math.hypot(math.log(size[0] / asked[0]), math.log(size[1] / asked[1])))
