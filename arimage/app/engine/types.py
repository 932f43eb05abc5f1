"""Requests to the engine, their limits, progress and results."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from PIL import Image
from pydantic import ConfigDict, Field

from ...decoding import Order
from ...media.film import Film
from ...pipelines.kinds.hybrid import MAX_STEPS
from ...pipelines.seeds import image_seeds
from ...pipelines.text.known import Unknown
from ...settings.schema import Share


# The fields of `Request` that belong to `Sampling`.
SAMPLING = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")
# Those that the metadata of an image hold as the client gave them.
NOTED = (
    *SAMPLING, "prompt", "class_label", "negative_prompt", "order", "num_inference_steps", "decoder_guidance_scale",
)  # fmt: skip
# The largest number of forward passes that a film shows.
FILM_STEPS = 64
# `validation.check_types` checks the fields of requests against their annotations: "3" is not 3, and true is not 1.
EXACT_TYPES = ConfigDict(strict=True, revalidate_instances="always", arbitrary_types_allowed=True)
Seed = Annotated[int, Field(ge=0, le=2**53 - 1)]
Scale = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


class Refused(ValueError):
    """A refused request, with one sentence that names the problem and the remedy.

    Attributes:
        parameter: the field of `Request` at fault, if there is one.
        busy: whether the queue was full; the same request may be accepted later.
    """

    def __init__(self, message: str, parameter: str | None = None, busy: bool = False):
        super().__init__(message)
        self.parameter, self.busy = parameter, busy


class Cancelled(Exception):
    """The request was cancelled, by `Ticket.cancel` or because the engine was closed."""


class Unavailable(Exception):
    """The process that was to generate the images has ended; the same request may succeed later."""


@dataclass(frozen=True)
class Limits:
    """Limits on the requests that the engine accepts.

    Attributes:
        queue: number of waiting requests.
        prompt_characters: length of a prompt or negative prompt.
        images: number of images per request.
        pixels: height * width of an uploaded image, which is a photo.
        output_pixels: height * width of generated images; sizes of the models above it are not offered. None offers
            all.
        upload_bytes: bytes of an uploaded image, with its mask.
        work: images * tokens per image of a request for several images.
        setting: the largest number in the settings of a decoding.
        positions: number of positions of an image that the settings of a decoding may make a forward pass evaluate.
        batch: number of images generated together.
        metadata: whether images and videos say how they were made.
        gathering: seconds that an idle engine waits after a request for others that can join the batch.

    Raises:
        ValueError: if a limit is below 1 that must not be.
    """

    queue: int = 64
    prompt_characters: int = 4000
    images: int = 8
    pixels: int = 50_000_000
    output_pixels: int | None = None
    upload_bytes: int = 2**25
    work: int = 2**16
    setting: int = 128
    positions: int = 256
    batch: int = 8
    metadata: bool = True
    gathering: float = 0.01

    def __post_init__(self):
        for name, value in vars(self).items():
            if name not in ("gathering", "metadata") and value is not None and value < 1:
                raise ValueError(f"the limit {name} is {value}: give at least 1")


@dataclass(frozen=True)
class Request:
    """Images of one prompt or class. None means the default of the model.

    Attributes:
        model: a name of `Engine.models`.
        prompt: for models that generate from text; or the name of a class.
        class_label: for class-conditional models.
        count: number of images.
        seed: 0 .. 2**53 - 1. Image i has the seed `seeds_of(seed, count)[i]`: `seed` itself for the first.
        decoding: a name with settings, as in "sjd-lazy:window=64".
        guidance_scale, temperature, top_k, top_p, min_p: as in the pipelines; guidance_scale 0 .. 100, temperature
            0.01 .. 100.
        height, width: in pixels, one of the sizes of the model.
        negative_prompt: what to guide away from, for models that accept one.
        num_inference_steps: denoising steps, 1 .. 1000, for models that accept them.
        decoder_guidance_scale: that of a diffusion decoder, 0 .. 100, where `guidance_scale` is that of the tokens.
        order: of the tokens, for models that accept one: "raster", "random", "farthest" or "locality".
        image, mask_image: an image to edit, and a mask that is white where it changes; both or neither.
        references: images that the model reads together with the prompt, at most `ModelInfo.references`.
        preview_every: forward passes between partial images; 0 means none.
        previews: number of partial images, spread evenly over the tokens, in addition to those of `preview_every`.
        film: record how the first image is generated.
        client: who asks; the requests of several clients take turns.
    """

    __pydantic_config__ = EXACT_TYPES

    model: str
    prompt: str | None = None
    class_label: int | None = None
    count: int = 1
    seed: Seed = 0
    decoding: Annotated[str, Field(max_length=200)] | None = None
    guidance_scale: Scale | None = None
    temperature: Annotated[float, Field(ge=0.01, le=100, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0, le=2**20)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    height: int | None = None
    width: int | None = None
    negative_prompt: str | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    decoder_guidance_scale: Scale | None = None
    order: Order | None = None
    image: Image.Image | None = None
    mask_image: Image.Image | None = None
    references: tuple[Image.Image, ...] = ()
    preview_every: Annotated[int, Field(ge=0, le=2**53 - 1)] = 0
    previews: Annotated[int, Field(ge=0, le=64)] = 0
    film: bool = False
    client: str = ""


@dataclass(frozen=True)
class Progress:
    """The progress of a request.

    Attributes:
        passes: forward passes so far.
        decided: tokens decided so far.
        tokens: number of tokens of all its images.
        previews: the images so far, greyed out where tokens are not decided yet; None in most reports, see
            `Request.preview_every` and `Request.previews`.
        queue_position: its position in the queue, from 1; 0 while it is running.
    """

    passes: int
    decided: int
    tokens: int
    previews: list[Image.Image] | None = None
    queue_position: int = 0


@dataclass(frozen=True)
class Result:
    """The result of a request.

    Attributes:
        images: the finished images. The `info` of each holds its metadata under `media.metadata.KEY`, unless the
            limits leave them out.
        seeds: the seed of each image; a request for one image with that seed generates it again.
        passes: forward passes in which its images were generated.
        tokens_per_pass: tokens of an image divided by its forward passes, averaged over the images.
        seconds: from the prefill of its first image to the pixels of its last one. Includes other requests in the same
            batch, but not the rendering of a film.
        exact: whether the decoding samples from the model's own distribution.
        decoding: its name and settings, as in `Request.decoding`.
        deciding_pass: int64 [count, rows, columns], the forward pass, from 1, that decided each token; None for
            next-scale models.
        settings: the request as JSON values, with the defaults filled in.
        film: a film of the first image, if requested.
        unknown: the message about a prompt that the model does not know; None if it knows the prompt, or has no list
            of captions.
        head_calls: sequential calls of denoising heads; 0 for models without one.
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
    film: Film | None = None
    unknown: Unknown | None = None
    head_calls: int = 0


def seeds_of(seed: int, count: int) -> list[int]:
    """The seed of every image of a request, those of the pipelines: `seed` itself is the first."""
    return image_seeds(torch.Generator().manual_seed(seed), count)
