"""Reference images: those that a model reads together with a prompt."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from diffusers.image_processor import PipelineImageInput, VaeImageProcessor
from PIL import Image

from ...media.files import to_rgb
from .images import parts_of, to_pixels


References: TypeAlias = PipelineImageInput | Sequence[Sequence[Image.Image]]


def split_references(
    image: References | None, mask_image: PipelineImageInput | None, image_reference: References | None
) -> tuple[References | None, References | None]:
    """The image to edit by a mask, and the references: `image_reference`, or `image` if there is no mask."""
    if mask_image is not None:
        return image, image_reference
    if image is not None and image_reference is not None:
        raise ValueError(
            "image without mask_image is a reference, like image_reference: give one of the two, or a mask_image"
        )
    return None, image if image_reference is None else image_reference


def as_references(name: str, images: References, count: int, most: int) -> list[list[Image.Image]]:
    """The reference images of each of `count` prompts, in mode RGB.

    Args:
        name: the name of the argument, for error messages.
        images: an image or a list of images, all of them for every prompt; or a list of lists, one for each prompt.
            If a prompt may have one reference only, a list may also hold one image for each. For an image see
            `to_pixels`; arrays and tensors are rounded to 8 bits. An image that is given several times is the same
            object in the result, too.
        most: how many references a prompt may have.
    """
    parts = parts_of(name, images)
    nested = any(isinstance(part, list | tuple) for part in parts)
    lists = parts if nested else [parts]
    if not all(isinstance(part, list | tuple) for part in lists):
        raise ValueError(f"{name} holds lists and images: give one list for all prompts, or one list for each")
    if nested and len(lists) != count:
        raise ValueError(
            f"{name} holds {len(lists)} lists for {count} prompts: give one list for all, or one list for each"
        )
    each = [part for listed in lists for part in parts_of(name, listed)]
    if any(isinstance(part, list | tuple) for part in each):
        raise ValueError(f"{name} holds lists of lists of lists: give one list for all prompts, or one list for each")
    read: dict[int, list[Image.Image]] = {}
    for part in each:
        if id(part) not in read:
            read[id(part)] = [to_rgb(name, part)] if isinstance(part, Image.Image) else _from_values(name, part)
    references = [[image for part in listed for image in read[id(part)]] for listed in lists]
    if not nested:
        one_each = most == 1 and len(references[0]) == count
        references = [[image] for image in references[0]] if one_each else references * count
    found = max(map(len, references))
    if found > most:
        raise ValueError(f"{name} holds {found} references for a prompt: this model takes at most {most}")
    return references


def each_once(function: Callable[[Image.Image], Any], references: Sequence[Sequence[Image.Image]]) -> list[list[Any]]:
    """What a function returns for each reference of each prompt; once for those that are the same object."""
    found: dict[int, Any] = {}
    for image in itertools.chain(*references):
        if id(image) not in found:
            found[id(image)] = function(image)
    return [[found[id(image)] for image in listed] for listed in references]


def common_size(references: list[list[Image.Image]]) -> tuple[int, int]:
    """Width and height of the last reference of every prompt."""
    sizes = {listed[-1].size for listed in references}
    if len(sizes) > 1:
        raise ValueError("the last references of the prompts differ in size: give height and width")
    return sizes.pop()


def _from_values(name: str, values: PipelineImageInput) -> list[Image.Image]:
    return VaeImageProcessor().postprocess(to_pixels(name, values), output_type="pil")
