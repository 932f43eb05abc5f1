"""Checks whether a model supports a request and the limits allow it, and fills in the defaults."""

from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...decoding import Decoding, parse_decoding
from ...decoding.contract.distribution import Sampling
from ...decoding.contract.layout import Layout
from ...decoding.contract.supports import DecodingMethod
from ...pipelines.base import ARImagePipeline, ARPipeline
from ...settings.schema import check_encodable, sentence
from .models import ModelInfo
from .types import SAMPLING, Limits, Refused, Request
from .uploads import asked_size, check_pixels, default_size


@dataclass(frozen=True)
class Plan:
    """A checked request with its defaults filled in; requests with equal plans are generated together.

    Attributes:
        size: height and width in pixels.
        tokens: tokens per image.
        decoder: the number of denoising steps, and other arguments of a diffusion decoder, by name.
        order: the order of the tokens; None for models in raster order.
        edits: whether there is an image to edit.
        reads: whether there are reference images.
    """

    model: str
    decoding: Decoding
    sampling: Sampling
    size: tuple[int, int]
    tokens: int
    negative_prompt: str | None
    decoder: tuple[tuple[str, float], ...]
    order: str | None
    edits: bool
    reads: bool


def check_types(request: Any) -> None:
    """Refuse a request with a field that is not of its annotated type, or out of its range.

    Args:
        request: a `Request` or a `VideoRequest`.

    Raises:
        Refused: with the field.
    """
    try:
        TypeAdapter(type(request)).validate_python(request)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise Refused(sentence(error, vars(request)), str(first["loc"][0])) from error


def with_class(request: Request, pipe: ARImagePipeline) -> Request:
    """The request with the class id for its prompt, if the model generates classes and names them.

    Raises:
        Refused: if no class or several classes have this name.
    """
    if pipe.class_names is None or request.prompt is None or request.class_label is not None:
        return request
    try:
        return replace(request, prompt=None, class_label=pipe.get_label_ids(request.prompt)[0])
    except ValueError as error:
        raise Refused(str(error), "prompt") from error


def check(request: Request, pipe: ARImagePipeline, info: ModelInfo, limits: Limits) -> Plan:
    """Refuse a request that `pipe` does not support or `limits` do not allow, before any computation.

    Raises:
        Refused: with the reason.
    """
    _check_condition(request, info, limits)
    if not 1 <= request.count <= limits.images:
        raise Refused(f"{request.count} images are asked for: ask for 1 to {limits.images}", "count")
    default = default_size(request, info)
    size = asked_size(request, default)
    check_size(request.model, size, info)
    tokens = pipe.num_tokens(size) or info.tokens * size[0] * size[1] // (info.sizes[0][0] * info.sizes[0][1])
    if request.count > 1 and request.count * tokens > limits.work:
        raise Refused(
            f"{request.count} images of {tokens} tokens are more than the {limits.work} tokens of a request: ask for "
            "fewer or smaller images",
            "count",
        )
    return Plan(
        model=request.model,
        decoding=check_decoding(request.model, request.decoding, pipe, info, size, limits),
        sampling=_check_sampling(request, pipe),
        size=size,
        tokens=tokens,
        negative_prompt=request.negative_prompt,
        decoder=_check_decoder(request, pipe),
        order=_check_order(request, info),
        edits=_check_uploads(request, info, limits),
        reads=bool(request.references),
    )


def _check_condition(request: Request, info: ModelInfo, limits: Limits) -> None:
    if info.classes is not None:
        if request.prompt is not None:
            remedy = "class_label or a name, not both" if info.class_names else "class_label and no prompt"
            raise Refused(f"{request.model} generates classes, not text: give {remedy}", "prompt")
        if request.class_label is None:
            raise Refused(
                f"{request.model} generates classes: give class_label, 0 to {info.classes - 1}", "class_label"
            )
        if not 0 <= request.class_label < info.classes:
            raise Refused(
                f"class_label is {request.class_label}: give a whole number from 0 to {info.classes - 1}",
                "class_label",
            )
    elif request.class_label is not None:
        raise Refused(f"{request.model} generates from text: give a prompt and no class_label", "class_label")
    else:
        check_prompt(request.model, request.prompt or "")
    if request.negative_prompt is not None and not info.negative_prompt:
        raise Refused(f"{request.model} does not accept negative_prompt: leave it out", "negative_prompt")
    for name in ("prompt", "negative_prompt"):
        check_text(name, getattr(request, name) or "", limits)


def check_prompt(model: str, prompt: str) -> None:
    """Refuse an empty prompt."""
    if not prompt.strip():
        raise Refused(f'the prompt is empty: say what {model} should generate, as in "a red heart"', "prompt")


def check_text(name: str, text: str, limits: Limits) -> None:
    """Refuse a text that is too long or cannot be encoded."""
    if len(text) > limits.prompt_characters:
        raise Refused(f"the {name} has {len(text)} characters: shorten it to at most {limits.prompt_characters}", name)
    try:
        check_encodable(name, text)
    except ValueError as error:
        raise Refused(str(error), name) from error


def check_size(model: str, size: tuple[int, int], info: ModelInfo) -> None:
    """Refuse a size (height, width) that a model does not have.

    Raises:
        Refused: with its sizes.
    """
    if size not in info.sizes:
        sizes = ", ".join(f"{width}x{height}" for height, width in info.sizes)
        raise Refused(
            f"{model} does not generate {size[1]}x{size[0]} pixels (width x height): choose among {sizes}", "size"
        )


def check_decoding(
    model: str, text: str | None, pipe: ARPipeline, info: ModelInfo, size: tuple[int, int], limits: Limits
) -> Decoding:
    """The decoding of a request from its name and settings, by default the model's.

    Raises:
        Refused: if the decoding is unknown, the model cannot run it, or its settings are beyond the limits.
    """
    if text is None:
        return pipe.decoding
    try:
        name, settings = parse_decoding(text)
        if name not in info.decodings:
            raise Refused(f"{model} cannot run the decoding {name[:40]!r}: choose among {', '.join(info.decodings)}")
        for key, value in settings.items():
            if key == "drafter" or isinstance(value, dict) or value == "auto":
                raise Refused(f"the decoding's setting {key} cannot be chosen here: leave it out")
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(one, int | float) and not abs(one) <= limits.setting for one in numbers):
                raise Refused(f"the decoding's setting {key}={value} is too large: give at most {limits.setting}")
        decoding = pipe.as_decoding(text)
        evaluated = _positions(decoding, info, size)
        if settings and evaluated > limits.positions:
            raise Refused(
                f"the decoding {text} evaluates {evaluated} positions per forward pass: choose settings with at most "
                f"{limits.positions}"
            )
        return decoding
    except ValueError as error:
        raise Refused(str(error), "decoding") from error


def _positions(decoding: Decoding, info: ModelInfo, size: tuple[int, int]) -> int:
    """How many positions of an image of this size the settings make a step evaluate; 0 for next-scale models, where
    none does."""
    if info.grid is None or not isinstance(decoding, DecodingMethod):
        return 0
    *frames, rows, columns = info.grid
    height, width = info.sizes[0]
    layout = Layout((*frames, rows * size[0] // height, columns * size[1] // width))
    return decoding.positions(layout) or 0


def _check_order(request: Request, info: ModelInfo) -> str | None:
    if request.order is None:
        return info.order
    if info.order is None:
        raise Refused(f"{request.model} does not accept order: leave it out", "order")
    return request.order


def _check_sampling(request: Request, pipe: ARImagePipeline) -> Sampling:
    given = {name: getattr(request, name) for name in SAMPLING}
    if request.references and request.guidance_scale is None:
        given["guidance_scale"] = pipe.reference_guidance_scale
    try:
        return pipe.sampling(**given)
    except ValueError as error:
        raise Refused(str(error)) from error


def _check_decoder(request: Request, pipe: ARImagePipeline) -> tuple[tuple[str, float], ...]:
    for name in ("num_inference_steps", "decoder_guidance_scale"):
        if getattr(request, name) is not None and not pipe.abilities.accepts(name):
            raise Refused(f"{request.model} does not accept {name}: leave it out", name)
    names = pipe.abilities.decoder | pipe.abilities.arguments & {"num_inference_steps"}
    given = {name: getattr(request, name) for name in sorted(names)}
    return tuple((name, pipe.generation_config[name] if value is None else value) for name, value in given.items())


def _check_uploads(request: Request, info: ModelInfo, limits: Limits) -> bool:
    """Whether there is an image to edit."""
    if request.image is not None and not info.edits:
        raise Refused(f"{request.model} does not edit images: leave out image and mask_image", "image")
    if (request.image is None) != (request.mask_image is None):
        raise Refused("image and mask_image belong together: give both, or neither", "image")
    found, most = len(request.references), info.references
    if found > most:
        asked = f"give at most {most}" if most else "leave them out"
        raise Refused(f"{request.model} takes {most or 'no'} reference images, not {found}: {asked}", "image")
    uploads = [("image", request.image), ("mask_image", request.mask_image)]
    uploads += [("image", reference) for reference in request.references]
    for name, upload in uploads:
        if upload is not None:
            check_pixels(name, upload, limits)
    return request.image is not None
