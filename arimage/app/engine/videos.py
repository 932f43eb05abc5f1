"""Generates the videos of the demo, one after another, and yields frames as soon as their maps are complete."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch
from PIL import Image

from ...decoding import decoding_to_text
from ...pipelines.base import ARPipeline
from .models import ModelInfo, describe
from .types import EXACT_TYPES, Limits, Refused, Seed
from .validation import check_pixels, check_prompt, check_text, check_types


@dataclass(frozen=True)
class VideoRequest:
    """A request for a video from one prompt; `image` is its first frame. None means the default of the model."""

    __pydantic_config__ = EXACT_TYPES

    model: str
    prompt: str
    seed: Seed = 0
    decoding: str | None = None
    image: Image.Image | None = None


@dataclass(frozen=True)
class VideoProgress:
    """A video so far.

    Attributes:
        frames: the frames whose maps are complete; once the video is finished, all frames.
        passes: forward passes so far.
        map_passes: the number of forward passes after which each map was complete; 0 for given maps.
        decided, tokens: the number of decided tokens, and of all tokens.
        seconds: the time since the generation began.
        finished: the name of the decoding and whether it is exact, once the video is finished.
    """

    frames: list[Image.Image]
    passes: int
    map_passes: list[int]
    decided: int
    tokens: int
    seconds: float
    finished: tuple[str, bool] | None = None


class VideoMaker:
    """Generates one video at a time; other requests wait for it.

    Args:
        pipelines: video pipelines by the names that requests use.

    Attributes:
        models: the abilities of each pipeline, by name.
        fps: the frames per second of its videos, by name.
        on_device_error: called with an error of the device, from which no process recovers.

    Raises:
        ValueError: if a pipeline needs an image or a video to begin with.
    """

    def __init__(self, pipelines: dict[str, ARPipeline], limits: Limits | None = None):
        self.limits, self._pipelines, self._lock = limits or Limits(), pipelines, threading.Lock()
        for pipe in pipelines.values():
            pipe.set_progress_bar_config(disable=True)
        self.models: dict[str, ModelInfo] = {name: describe(name, pipe) for name, pipe in pipelines.items()}
        self.fps = {name: pipe.config.fps for name, pipe in pipelines.items()}
        self.on_device_error: Callable[[BaseException], None] = lambda error: None

    def warm_up(self) -> None:
        """Where steps are captured, on a CUDA device, capture those of each model's defaults."""
        for pipe in self._pipelines.values():
            if pipe.captures:
                pipe.warm_up()

    def run(self, request: VideoRequest) -> Generator[VideoProgress, None, None]:
        """Yield the video whenever there are more frames, and at the end. Closing the iterator stops the generation.

        Raises:
            Refused: if the model does not support the request, or the limits do not allow it.
        """
        limits = self.limits
        check_types(request)
        if request.model not in self._pipelines:
            raise Refused(f"unknown model {request.model[:80]!r}: choose among {', '.join(self._pipelines)}", "model")
        check_prompt(request.model, request.prompt)
        check_text("prompt", request.prompt, limits)
        if request.image is not None:
            check_pixels("image", request.image, limits)
        with self._lock:
            try:
                yield from _generate(self._pipelines[request.model], request)
            except torch.AcceleratorError as error:
                self.on_device_error(error)
                raise


def _generate(pipe: ARPipeline, request: VideoRequest) -> Iterator[VideoProgress]:
    events: queue.SimpleQueue[VideoProgress | Exception] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        try:
            _call(pipe, request, events, stopped)
        # The reader of the events raises it.
        except Exception as error:
            events.put(error)

    thread = threading.Thread(target=work, name="arimage-video", daemon=True)
    thread.start()
    try:
        while True:
            event = events.get()
            if isinstance(event, ValueError):
                raise Refused(str(event)) from event
            if isinstance(event, Exception):
                raise event
            yield event
            if event.finished is not None:
                return
    finally:
        stopped.set()
        thread.join()


def _call(pipe, request: VideoRequest, events: queue.SimpleQueue, stopped: threading.Event) -> None:
    frames: list[Image.Image] = []
    map_passes: list[int] = []
    stream, began = pipe.vq.stream(), time.perf_counter()

    def show(maps: torch.LongTensor) -> None:
        """Decode the next maps [1, t, h, w]."""
        frames.extend(pipe.to_images(pipe.current_call, stream.decode(maps).float())[0])

    def on_step(pipe, step: int, passes: int, tensors: dict[str, torch.Tensor]) -> None:
        if stopped.is_set():
            pipe._interrupt = True
            return
        call = pipe.current_call
        if not map_passes and call.above.shape[1]:
            show(call.above)
            map_passes.extend([0] * call.above.shape[1])
        given = call.above.shape[1]
        decided = call.layout.to_places(tensors["decided"])[0].flatten(1)
        complete = int(decided.all(1).long().cumprod(0).sum())
        shown = len(map_passes) - given
        if complete > shown:
            show(call.layout.to_places(tensors["tokens"])[:, shown:complete])
            map_passes.extend([passes] * (complete - shown))
        now = time.perf_counter() - began
        events.put(VideoProgress(list(frames), passes, list(map_passes), int(decided.sum()), decided.numel(), now))

    output = pipe(
        request.prompt,
        image=request.image,
        decoding=request.decoding,
        generator=torch.Generator().manual_seed(request.seed),
        callback_on_step_end=on_step,
        callback_on_step_end_tensor_inputs=["tokens", "decided"],
    )
    decoding = request.decoding or decoding_to_text(pipe.decoding)
    passes, tokens, seconds = output.stats.forward_passes, output.tokens[0].numel(), time.perf_counter() - began
    done = (decoding, output.stats.exact)
    events.put(VideoProgress(output.frames[0], passes, map_passes, tokens, tokens, seconds, done))
