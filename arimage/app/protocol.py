"""What can be asked of the engine, within which limits, and what comes back."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from ..eval.manifest import image_seed


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


def image_seeds(seed: int, count: int) -> list[int]:
    """The seed of every image of a request: `seed` itself, then 32 bits of the hash of `seed` and the image's index."""
    return [seed] + [image_seed(seed, i) % 2**32 for i in range(1, count)]
