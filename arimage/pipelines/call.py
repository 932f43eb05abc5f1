"""What one call of a pipeline needs, from its checked arguments to its images."""

from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from ..decoding import Decoding, Layout, Sampling, ScaleModel, TokenModel
from ..decoding.interface import generates_tokens


@dataclass
class GenerationCall:
    """A call of a pipeline for B images. Nothing of a call is stored on its pipeline, so that calls may run in several threads
    or inside of each other's callbacks.

    Attributes:
        model: the `TokenModel` or `ScaleModel` with the conditions of the images.
        sampling: the `Sampling` of the tokens; its `forced` tokens are those of an edited image that are known.
        seeds: int64 [B], one seed per image.
        size: height and width of the images in pixels.
        num_images_per_prompt: images per prompt or class.
        pixels: for an edit the given images, float32 [B, 3, H, W] in [-1, 1].
        repaint: for an edit where they change, bool [B, 1, H, W].
        above: tokens [B, h, w] of given panels on top of the generated ones.
        images: which images of the model these are; None for all.
        decoding, output_type, callback, callback_tensor_inputs: arguments of `__call__`.
        interrupted: whether a callback stopped this call.
    """

    sampling: Sampling
    seeds: torch.LongTensor
    size: tuple[int, int]
    num_images_per_prompt: int = 1
    model: TokenModel | ScaleModel = None  # pyright: ignore[reportAssignmentType] `prepare` sets it
    pixels: torch.Tensor | None = None
    repaint: torch.BoolTensor | None = None
    above: torch.LongTensor | None = None
    images: torch.LongTensor | None = None
    decoding: Decoding = None  # pyright: ignore[reportAssignmentType] `generate` sets it
    output_type: str = "pil"
    callback: Callable | None = None
    callback_tensor_inputs: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def guided(self) -> bool:
        """Whether the logits without the condition are needed."""
        return self.sampling.guided

    @property
    def layout(self) -> Layout:
        """The layout of the tokens, of a model that generates token by token."""
        assert generates_tokens(self.model)
        return self.model.layout if self.images is None else self.model.layout.take(self.images)

    def per_image(self, values: torch.Tensor) -> torch.Tensor:
        """One row per prompt to one row per image, on the device of the seeds."""
        return values.to(self.seeds.device).repeat_interleave(self.num_images_per_prompt, dim=0)

    def select(self, rows: slice | list[int]) -> "GenerationCall":
        """The call for some of its images, to decode their tokens to pixels."""
        parts = {name: getattr(self, name) for name in ("seeds", "pixels", "repaint", "above", "images")}
        if self.images is None:
            parts["images"] = torch.arange(len(self.seeds), device=self.seeds.device)
        return replace(self, **{name: part if part is None else part[rows] for name, part in parts.items()})


# The running calls of this thread, the innermost last, each with its pipeline.
_RUNNING: ContextVar[tuple[tuple[object, GenerationCall], ...]] = ContextVar("running", default=())


def running_call(pipe: object) -> GenerationCall | None:
    """The innermost call of `pipe` that runs in this thread."""
    return next((call for owner, call in reversed(_RUNNING.get()) if owner is pipe), None)


@contextmanager
def running(pipe: object, call: GenerationCall):
    """Let `running_call` return `call` inside of the block."""
    before = _RUNNING.set((*_RUNNING.get(), (pipe, call)))
    try:
        yield
    finally:
        _RUNNING.reset(before)
