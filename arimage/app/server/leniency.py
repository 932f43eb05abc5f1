"""What a server does with requests that it would refuse, for programs whose requests cannot be changed."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from PIL import Image, ImageChops

from ..engine.models import ModelInfo
from ..engine.types import Limits, Request


@dataclass(frozen=True)
class Leniency:
    """By default every such request is refused.

    Attributes:
        any_size: generate the nearest size that the model has.
        any_model: take the first model for an unknown one.
        ignore_unknown_fields: ignore fields that the API does not have and a negative prompt that the model does not
            take, and generate at most as many images as the limit.
        maskless_edits: "whole" generates the whole image of an edit that has neither a mask nor transparency.
    """

    any_size: bool = False
    any_model: bool = False
    ignore_unknown_fields: bool = False
    maskless_edits: Literal["refuse", "whole"] = "refuse"

    def whole_mask(self, image: Image.Image) -> Image.Image | None:
        """The mask of an edit without one, white everywhere, if `image` (RGBA) is opaque and this is allowed."""
        opaque = ImageChops.invert(image.getchannel("A")).getbbox() is None
        return Image.new("L", image.size, 255) if opaque and self.maskless_edits == "whole" else None

    def adapt(self, request: Request, info: ModelInfo, limits: Limits) -> tuple[Request, list[str]]:
        """The request that is generated instead, and the fields of it that are ignored."""
        ignored = []
        if self.ignore_unknown_fields:
            if request.negative_prompt is not None and not info.negative_prompt:
                request = dataclasses.replace(request, negative_prompt=None)
                ignored.append("negative_prompt")
            if request.count > limits.images:
                request = dataclasses.replace(request, count=limits.images)
                ignored.append("n")
        if self.any_size:
            request = nearest_size(request, info.sizes)
        return request, ignored


def nearest_size(request: Request, sizes: list[tuple[int, int]]) -> Request:
    """The request with the nearest of `sizes`, (height, width). Distances are between logarithms of height and width,
    so that aspect ratio and area count equally."""
    height, width = request.height, request.width
    if height is None or width is None:
        return request
    nearest = min(sizes, key=lambda size: math.hypot(math.log(size[0] / height), math.log(size[1] / width)))
    return dataclasses.replace(request, height=nearest[0], width=nearest[1])
