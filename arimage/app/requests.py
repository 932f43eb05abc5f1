"""What can be asked of the engine, within which limits, and what comes back."""

import dataclasses
import inspect
import math
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

from ..decoding import PRESETS, Decoding, decoding_from_name
from ..decoding.law import Sampling
from ..eval.bench import choose_decodings, parse_decoding
from ..pipelines.base import ARImagePipeline
from ..pipelines.class_or_text import ClassOrTextPipeline
from ..pipelines.pipeline_emu3 import Emu3Pipeline


# The ratios offered of a model that draws any.
RATIOS = ("1:1", "4:3", "3:4", "3:2", "2:3", "16:9", "9:16")
MAX_SEED = 2**53 - 1


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
    """

    queue: int = 64
    prompt_characters: int = 500
    images: int = 8
    pixels: int = 2**20
    work: int = 2**16
    setting: int = 128
    batch: int = 8
    gathering: float = 0.01


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


@dataclass(frozen=True)
class Progress:
    """How far a request is.

    Attributes:
        passes: forward passes so far.
        decided: codes decided so far, of the `codes` of all its images.
        previews: partial pictures of the images being drawn, where codes not decided yet are greyed; None mostly, see
            `Request.preview_every`.
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
class ModelInfo:
    """What a model can do.

    Attributes:
        classes: how many classes it draws, ids from 0; None if it draws from text.
        sizes: (height, width) in pixels, the default first.
        codes: of an image of the default size, those of all scales of a next-scale model.
        grid: rows and columns of codes of the default size; None of next-scale models.
        decodings: the names of those that it can run, and whether each is exact.
        decoding: its default one, a name with settings.
        sampling: its defaults: guidance_scale, temperature, top_k, top_p.
        negative_prompt: whether it knows such prompts.
    """

    classes: int | None
    sizes: list[tuple[int, int]]
    codes: int
    grid: tuple[int, int] | None
    decodings: dict[str, bool]
    decoding: str
    sampling: dict
    negative_prompt: bool


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
    """The seed of every image of a request: `seed` itself, then 32-bit numbers hashed from `seed` and the image's index."""
    return [seed] + [int(np.random.SeedSequence((seed, i)).generate_state(1)[0]) for i in range(1, count)]


@torch.no_grad()
def describe(pipe: ARImagePipeline) -> ModelInfo:
    """Find out what a pipeline can do, by starting every decoding on it.

    Raises:
        ValueError: if it takes neither text nor classes, or no decoding starts on it.
    """
    classes = None
    if isinstance(pipe, ClassOrTextPipeline) and pipe.transformer.config.conditioning == "class":
        classes = pipe.transformer.config.num_classes
    condition = {"prompt": ["a red heart"]} if classes is None else {"class_labels": [0]}
    decodings, _ = choose_decodings(pipe, condition, [], [], {})
    model = pipe.bind(**condition)
    codes = torch.zeros(1, model.num_tokens, dtype=torch.long, device=model.device)
    size = tuple(pipe.draw_codes(codes, torch.ones_like(codes, dtype=torch.bool)).shape[-2:])
    sizes = [size, *getattr(pipe, "image_sizes", [])]
    if isinstance(pipe, Emu3Pipeline):
        sizes += [pipe.image_size(ratio=ratio) for ratio in RATIOS]
    return ModelInfo(
        classes=classes,
        sizes=list(dict.fromkeys(map(tuple, sizes))),
        codes=model.num_tokens,
        grid=None if hasattr(model, "scales") else tuple(model.grid),
        decodings={name: decoding.exact for name, decoding in decodings.items()},
        decoding=decoding_text(pipe.decoding),
        sampling=dict(pipe.generation_config),
        negative_prompt="negative_prompt" in inspect.signature(pipe.__call__).parameters,
    )


def decoding_text(decoding: Decoding) -> str:
    """A decoding as `parse_decoding` reads it: the preset that it is closest to, and what differs from that."""

    def changes(name: str) -> dict:
        preset = decoding_from_name(name)
        fields = [field.name for field in dataclasses.fields(decoding)]
        return {key: getattr(decoding, key) for key in fields if getattr(decoding, key) != getattr(preset, key)}

    names = [name for name, preset in PRESETS.items() if preset.method is type(decoding)]
    name = min(names, key=lambda name: len(changes(name)))
    settings = ",".join(f"{key}={value}" for key, value in changes(name).items())
    return f"{name}:{settings}" if settings else name


def check(request: Request, pipe: ARImagePipeline, info: ModelInfo, limits: Limits) -> Plan:
    """Refuse a request that `pipe` cannot draw or `limits` do not allow, before any work.

    Raises:
        Refused: if it is so.
    """
    _check_condition(request, info, limits)
    _whole("count", request.count, 1, limits.images)
    _whole("seed", request.seed, 0, MAX_SEED)
    _whole("preview_every", request.preview_every, 0, info.codes)
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
    except (ValueError, TypeError) as error:
        raise Refused(str(error), "decoding") from error


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
        if picture is not None and picture.width * picture.height > limits.pixels:
            raise Refused(
                f"{name} has {picture.width}x{picture.height} pixels: give one of at most {limits.pixels}", name
            )
    return request.image is not None


def _whole(name: str, value: int, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise Refused(f"{name} is {value}: give a whole number from {least} to {most}", name)
