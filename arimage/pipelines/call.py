"""The data of one call of a pipeline, from its checked arguments to its images."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from ..decoding import Decoding, FewStepDecoding, LatentSampling, Layout, ReCAP, Sampling
from ..decoding.contract.models import Model


if TYPE_CHECKING:
    from ..models.conditions import Names


class Bindable(Protocol):
    """A model that is bound to prompts or classes, and from them to the images of a call."""

    @property
    def device(self) -> torch.device: ...

    def merge_prompts(self, *names: "Names") -> None:
        """Prefill prompts of one name once."""
        ...

    def take(self, images: torch.LongTensor) -> Any:
        """The model bound to these of its images."""
        ...


@dataclass(frozen=True)
class RunOptions:
    """The checked arguments of `__call__` that determine how a call runs, not what it generates."""

    decoding: Decoding
    output_type: str
    return_dict: bool
    callback: Callable | None
    callback_tensor_inputs: list[str]
    batch_size: int | None


@dataclass(frozen=True)
class DecoderSettings:
    """How the diffusion decoder of a hybrid pipeline generates the pixels.

    Attributes:
        num_inference_steps: denoising steps.
        guidance_scale: s in u + s (c - u), with predictions c under the condition and u without it; 1 or less disables
            guidance.
        latents: the noise to begin with, [B, C, h, w]; None derives it from the seeds.
    """

    num_inference_steps: int
    guidance_scale: float
    latents: torch.Tensor | None = None


@dataclass
class GenerationCall:
    """A call of a pipeline for B images. Nothing about a call is stored on its pipeline, so calls may run in several
    threads or inside each other's callbacks.

    Attributes:
        model: the `TokenModel`, `ScaleModel`, `VectorModel` or `LatentModel` with the conditions of the images.
        sampling: the `Sampling` of the tokens; its `forced` tokens are the given tokens of an edited image.
        seeds: int64 [B], the key of the random numbers of each image.
        image_seeds: the seed of each image, see `seeds.image_seeds`.
        size: height and width of the images in pixels.
        num_images_per_prompt: images per prompt or class.
        pixels: for an edit, the given images, float32 [B, 3, H, W] in [-1, 1].
        repaint: for an edit, where the images change, bool [B, 1, H, W].
        given_tokens: those [B, h, w] of given panels above the generated ones, or [B, M] of given passes of a film.
        images: the indices of the images in the model; None for all.
        decoder: for a hybrid pipeline, the settings of its decoder.
        conditions: for a hybrid pipeline, what its decoder reads about each image besides the tokens.
        seconds: seconds of the stages from tokens to pixels, by name, where a pipeline has several.
        decoding, output_type, callback, callback_tensor_inputs: arguments of `__call__`.
        interrupted: whether a callback stopped this call.
    """

    sampling: Sampling
    seeds: torch.LongTensor
    size: tuple[int, int]
    image_seeds: list[int] = field(default_factory=list)
    num_images_per_prompt: int = 1
    model: Model = None  # pyright: ignore[reportAssignmentType] `bind` sets it
    pixels: torch.Tensor | None = None
    repaint: torch.BoolTensor | None = None
    given_tokens: torch.LongTensor | None = None
    images: torch.LongTensor | None = None
    decoder: DecoderSettings = None  # pyright: ignore[reportAssignmentType] hybrid pipelines set it
    conditions: list = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    decoding: Decoding = None  # pyright: ignore[reportAssignmentType] `generate` sets it
    output_type: str = "pil"
    callback: Callable | None = None
    callback_tensor_inputs: list[str] = field(default_factory=list)
    interrupted: bool = False

    def now(self) -> float:
        """A time in seconds, once the device of the call has computed what was asked of it."""
        if self.seeds.device.type == "cuda":
            torch.cuda.synchronize(self.seeds.device)
        return time.perf_counter()

    @property
    def guided(self) -> bool:
        """Whether the unconditional logits are needed."""
        return self.sampling.guided

    @property
    def num_timesteps(self) -> int:
        """The largest number of forward passes per image: one per scale or per token, or the number that the call sets
        for a distilled or masked model."""
        model = self.model
        if model.kind == "vectors" and isinstance(self.decoding, FewStepDecoding):
            return len(self.decoding.passes(model))
        if model.kind == "masked_latents":
            assert isinstance(self.sampling, LatentSampling)
            own = self.decoding.steps if isinstance(self.decoding, ReCAP) else None
            return own or self.sampling.num_inference_steps
        if model.kind == "masked_tokens":
            return cast(Any, self.decoding).num_steps(model)
        return len(model.scales) if model.kind == "scales" else model.num_tokens

    @property
    def layout(self) -> Layout:
        """The layout of the tokens, for a model that does not generate maps."""
        assert self.model.kind != "scales"
        layout = self.model.layout
        assert layout is not None
        return layout if self.images is None else layout.take(self.images)

    def bind(self, model: Bindable, *names: "Names") -> None:
        """Set the model, bound to the prompts or classes. It prefills each of them once. `names`: of
        their embeddings, see `Conditions.merge`."""
        model.merge_prompts(*names)
        images = torch.arange(len(self.seeds), device=model.device)
        self.model = model.take(images // self.num_images_per_prompt)

    def per_image(self, values: torch.Tensor) -> torch.Tensor:
        """Repeat values per prompt to values per image, on the device of the seeds."""
        return values.to(self.seeds.device).repeat_interleave(self.num_images_per_prompt, dim=0)

    def select(self, images: slice | list[int]) -> "GenerationCall":
        """The same call for some of its images, to decode their tokens to pixels."""
        parts = {name: getattr(self, name) for name in ("seeds", "pixels", "repaint", "given_tokens", "images")}
        if self.images is None:
            parts["images"] = torch.arange(len(self.seeds), device=self.seeds.device)
        part = replace(self, **{name: part if part is None else part[images] for name, part in parts.items()})
        if self.conditions:
            chosen = range(len(self.seeds))[images] if isinstance(images, slice) else images
            part.conditions = [self.conditions[image] for image in chosen]
        if self.decoder is not None and self.decoder.latents is not None:
            part.decoder = replace(self.decoder, latents=self.decoder.latents[images])
        return part


# The running calls of this thread with their pipelines, innermost last.
_RUNNING: ContextVar[tuple[tuple[object, GenerationCall], ...]] = ContextVar("running", default=())


def running_call(pipe: object) -> GenerationCall | None:
    """The innermost running call of `pipe` in this thread."""
    return next((call for owner, call in reversed(_RUNNING.get()) if owner is pipe), None)


@contextmanager
def running(pipe: object, call: GenerationCall):
    """Make `running_call` return `call` inside the block."""
    before = _RUNNING.set((*_RUNNING.get(), (pipe, call)))
    try:
        yield
    finally:
        _RUNNING.reset(before)
