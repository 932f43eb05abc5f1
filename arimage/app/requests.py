"""What can be asked of the engine, within which limits, and what comes back."""

import math
from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..decoding import Decoding, decoding_from_name, parse_decoding
from ..decoding.distribution import Sampling
from ..eval.manifest import image_seed
from ..pipelines.base import ARImagePipeline
from .models import ModelInfo


MAX_SEED = 2**53 - 1
MAX_PREVIEWS = 64


class Refused(ValueError):
    """A request that is not drawn: one sentence that names the thing and the remedy.

    Attributes:
        parameter: the field of `Request` at fault, where it is one.
        busy: the queue is full; the same request may be drawn later.
    """

    def __init__(self, message: str, parameter: str | None = None, busy: bool = False):
        super().__init__(message)
        self.parameter, self.busy = parameter, busy


class Cancelled(Exception):
    """The request was cancelled, by `Ticket.cancel` or because the engine was closed."""


@dataclass(frozen=True)
class Limits:
    """What the engine takes on.

    Attributes:
        queue: requests that wait.
        prompt_characters: of a prompt, and of a negative prompt.
        images: of a request.
        pixels: height * width of a picture, drawn or uploaded.
        work: images * codes of a request.
        setting: the largest number in the settings of a decoding.
        batch: images that are drawn together.
        gathering: seconds that an idle engine waits after a request for others that go with it.

    Raises:
        ValueError: if a number of these leaves nothing to draw.
    """

    queue: int = 64
    prompt_characters: int = 500
    images: int = 8
    pixels: int = 2**20
    work: int = 2**16
    setting: int = 128
    batch: int = 8
    gathering: float = 0.01

    def __post_init__(self):
        for name, value in vars(self).items():
            if name != "gathering" and value < 1:
                raise ValueError(f"the limit {name} is {value}: give at least 1")


@dataclass(frozen=True)
class Request:
    """Images of one prompt or class. None stands for the model's default.

    Attributes:
        model: a name of `Engine.models`.
        prompt: what to draw, for models that draw from text.
        class_label: the class to draw, for models that draw classes.
        count: images.
        seed: 0 .. 2**53 - 1. Image i has the seed `image_seeds(seed, count)[i]`: `seed` itself for the first.
        decoding: a name with settings, as in "sjd-lazy:window=64".
        guidance_scale, temperature, top_k, top_p: as in the pipelines; guidance_scale 0 .. 100, temperature 0.01 .. 100.
        height, width: in pixels, one of the model's sizes.
        negative_prompt: what to guide away from, for models that know such prompts.
        image, mask_image: a picture to change, and white where it is drawn anew; both or neither.
        preview_every: passes between partial pictures; 0 is none.
        previews: partial pictures in all, spread evenly over the codes, beside those of `preview_every`.
    """

    model: str
    prompt: str | None = None
    class_label: int | None = None
    count: int = 1
    seed: int = 0
    decoding: str | None = None
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    height: int | None = None
    width: int | None = None
    negative_prompt: str | None = None
    image: Image.Image | None = None
    mask_image: Image.Image | None = None
    preview_every: int = 0
    previews: int = 0


@dataclass(frozen=True)
class Progress:
    """How far a request is.

    Attributes:
        passes: forward passes so far.
        decided: codes decided so far, of the `codes` of all its images.
        previews: partial pictures of the images being drawn, where codes not decided yet are greyed; None mostly, see
            `Request.preview_every` and `Request.previews`.
        queue_position: its place among the waiting requests, from 1; 0 while it is drawn.
    """

    passes: int
    decided: int
    codes: int
    previews: list[Image.Image] | None = None
    queue_position: int = 0


@dataclass(frozen=True)
class Result:
    """What a request gave.

    Attributes:
        images: its pictures.
        seeds: the seed of each; a request of one image with that seed draws it again.
        passes: forward passes until its last image was decided; of a request drawn in several batches, their sum.
        tokens_per_pass: codes of an image over the passes that it took, mean of the images.
        seconds: from when it began to be drawn, its company in the batch included.
        exact: whether the decoding samples the model's own law.
        decoding: its name and settings, as in `Request.decoding`.
        deciding_pass: int64 [count, rows, columns], the pass, from 1, that decided each code; None of next-scale models.
        settings: what was drawn, ready for JSON, defaults filled in.
    """

    images: list[Image.Image]
    seeds: list[int]
    passes: int
    tokens_per_pass: float
    seconds: float
    exact: bool
    decoding: str
    deciding_pass: np.ndarray | None
    settings: dict


@dataclass(frozen=True)
class Plan:
    """A checked request with its defaults filled in; requests of equal plans are drawn together."""

    model: str
    decoding: Decoding
    sampling: Sampling
    size: tuple[int, int]
    negative_prompt: str | None
    edits: bool


def image_seeds(seed: int, count: int) -> list[int]:
    """The seed of every image of a request: `seed` itself, then 32 bits of the hash of `seed` and the image's index."""
    return [seed] + [image_seed(seed, i) % 2**32 for i in range(1, count)]


def check(request: Request, pipe: ARImagePipeline, info: ModelInfo, limits: Limits) -> Plan:
    """Refuse a request that `pipe` cannot draw or `limits` do not allow, before any work.

    Raises:
        Refused: if it is so.
    """
    _check_condition(request, info, limits)
    if not isinstance(request.count, int) or not 1 <= request.count <= limits.images:
        raise Refused(f"{request.count} images are asked for: ask for 1 to {limits.images}", "count")
    _whole("seed", request.seed, 0, MAX_SEED)
    _whole("preview_every", request.preview_every, 0, MAX_SEED)
    _whole("previews", request.previews, 0, MAX_PREVIEWS)
    size = _check_size(request, info, limits)
    codes = info.codes * size[0] * size[1] / (info.sizes[0][0] * info.sizes[0][1])
    if request.count * codes > limits.work:
        raise Refused(
            f"{request.count} images of {codes:.0f} codes are more than the {limits.work} codes of a request: ask for "
            "fewer or smaller images",
            "count",
        )
    return Plan(
        model=request.model,
        decoding=_check_decoding(request, pipe, info, limits),
        sampling=_check_sampling(request, pipe),
        size=size,
        negative_prompt=request.negative_prompt,
        edits=_check_pictures(request, limits),
    )


def _check_condition(request: Request, info: ModelInfo, limits: Limits) -> None:
    if info.classes is not None:
        if request.prompt is not None:
            raise Refused(f"{request.model} draws classes, not text: give class_label and no prompt", "prompt")
        if request.class_label is None:
            raise Refused(f"{request.model} draws classes: give class_label, 0 to {info.classes - 1}", "class_label")
        _whole("class_label", request.class_label, 0, info.classes - 1)
    elif request.class_label is not None:
        raise Refused(f"{request.model} draws from text: give a prompt and no class_label", "class_label")
    elif not (request.prompt or "").strip():
        raise Refused(f'the prompt is empty: say what {request.model} shall draw, as in "a red heart"', "prompt")
    if request.negative_prompt is not None and not info.negative_prompt:
        raise Refused(f"{request.model} knows no negative_prompt: leave it out", "negative_prompt")
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name) or ""
        if len(text) > limits.prompt_characters:
            raise Refused(
                f"the {name} has {len(text)} characters: shorten it to at most {limits.prompt_characters}", name
            )
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise Refused(f"the {name} holds half a surrogate pair: send it as UTF-8", name)


def _check_size(request: Request, info: ModelInfo, limits: Limits) -> tuple[int, int]:
    default = info.sizes[0]
    size = (request.height or default[0], request.width or default[1])
    if size not in info.sizes:
        sizes = ", ".join(f"{height}x{width}" for height, width in info.sizes)
        raise Refused(
            f"{request.model} draws no {size[0]}x{size[1]} pixels (height x width): it draws {sizes}", "size"
        )
    if size[0] * size[1] > limits.pixels:
        raise Refused(f"{size[0]}x{size[1]} pixels are more than {limits.pixels}: ask for a smaller picture", "size")
    return size


def _check_decoding(request: Request, pipe: ARImagePipeline, info: ModelInfo, limits: Limits) -> Decoding:
    if request.decoding is None:
        return pipe.decoding
    try:
        name, settings = parse_decoding(request.decoding)
        if name not in info.decodings:
            choices = ", ".join(info.decodings)
            raise Refused(f"{request.model} cannot run the decoding {name[:40]!r}: choose among {choices}")
        for key, value in settings.items():
            if key in ("drafter", "acceptance") or value == "auto":
                raise Refused(f"the decoding's setting {key}={value} cannot be chosen here: leave it out")
            if not isinstance(value, str) and not abs(value) <= limits.setting:
                raise Refused(f"the decoding's setting {key}={value} is too large: give at most {limits.setting}")
        return decoding_from_name(name, **settings)
    except ValueError as error:
        raise Refused(str(error), "decoding") from error
    except TypeError as error:
        raise Refused(
            f"a setting of {request.decoding[:80]!r} is of the wrong kind: `arimage decodings` lists them", "decoding"
        ) from error


def _check_sampling(request: Request, pipe: ARImagePipeline) -> Sampling:
    for name, least, most in (("guidance_scale", 0, 100), ("temperature", 0.01, 100), ("top_p", 0, 1)):
        value = getattr(request, name)
        if value is not None and not (math.isfinite(value) and least <= value <= most):
            raise Refused(f"{name} is {value}: give a number from {least} to {most}", name)
    if request.top_k is not None:
        _whole("top_k", request.top_k, 0, 2**20)
    try:
        return pipe.sampling(
            guidance_scale=request.guidance_scale,
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
        )
    except ValueError as error:
        raise Refused(str(error)) from error


def _check_pictures(request: Request, limits: Limits) -> bool:
    """Whether there is a picture to change."""
    if (request.image is None) != (request.mask_image is None):
        raise Refused("image and mask_image belong together: give both, or neither", "image")
    for name in ("image", "mask_image"):
        picture = getattr(request, name)
        if picture is not None:
            check_pixels(name, picture, limits)
    return request.image is not None


def check_pixels(name: str, picture: Image.Image, limits: Limits) -> None:
    """Refuse a picture that is too large; one that was only opened is not read.

    Raises:
        Refused: if it is so.
    """
    if picture.width * picture.height > limits.pixels:
        raise Refused(f"{name} has {picture.width}x{picture.height} pixels: give one of at most {limits.pixels}", name)


def _whole(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{name} is {value}: give a whole number from {least} to {most}", name)
