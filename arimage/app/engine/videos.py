"""Generates videos, one after another, and yields frames as soon as their maps are complete."""

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass

import torch
from PIL import Image

from ...cli.made import notes_of
from ...decoding import decoding_to_text
from ...pipelines.base import ARPipeline
from ...pipelines.output import Tokens
from .models import ModelInfo, describe
from .types import EXACT_TYPES, Limits, Refused, Seed
from .uploads import asked_size, check_pixels
from .validation import check_decoding, check_prompt, check_size, check_text, check_types


# The share of the time that previews may take.
PREVIEWS = 0.2
# Seconds between two reports of a video that waits for another one.
PAUSE = 1.0


@dataclass(frozen=True)
class VideoRequest:
    """A request for a video of `num_frames` from one prompt, of `height` and `width` in pixels; `image` is its first
    frame. None means the default of the model."""

    __pydantic_config__ = EXACT_TYPES

    model: str
    prompt: str
    seed: Seed = 0
    decoding: str | None = None
    image: Image.Image | None = None
    num_frames: int | None = None
    height: int | None = None
    width: int | None = None


@dataclass(frozen=True)
class VideoProgress:
    """A video so far.

    Attributes:
        frames: the frames whose maps are complete, or small frames of the clips so far, one per second; once the video
            is finished, all frames.
        passes: forward passes so far.
        appeared: the number of forward passes after which each map or clip was complete; 0 for given maps.
        decided, tokens: the number of decided tokens, and of all tokens.
        work: the share of the work that is done.
        seconds: the time since the generation began.
        finished: the name of the decoding and whether it is exact, once the video is finished.
        note: the metadata of the video, once it is finished.
    """

    frames: list[Image.Image]
    passes: int
    appeared: list[int]
    decided: int
    tokens: int
    work: float
    seconds: float
    finished: tuple[str, bool] | None = None
    note: str | None = None


# While another video is being generated.
WAITING = VideoProgress([], 0, [], 0, 0, 0.0, 0.0)


class VideoMaker:
    """Generates one video at a time; other requests wait for it.

    Args:
        pipelines: video pipelines by the names that requests use.
        lora: the adapters that are active, FILE[:SCALE] each.

    Attributes:
        models: the abilities of each pipeline, by name.
        fps: the frames per second of its videos, by name.
        at_a_time: how many videos it generates at a time.
        on_device_error: called with an error of the device, from which no process recovers.

    Raises:
        ValueError: if a pipeline needs an image or a video to begin with.
    """

    at_a_time = 1

    def __init__(self, pipelines: dict[str, ARPipeline], limits: Limits | None = None, lora: Iterable[str] = ()):
        self._lora = list(lora)
        self.limits, self._pipelines, self._lock = limits or Limits(), pipelines, threading.Lock()
        for pipe in pipelines.values():
            pipe.set_progress_bar_config(disable=True)
        self.models: dict[str, ModelInfo] = {
            name: describe(name, pipe, self.limits) for name, pipe in pipelines.items()
        }
        self.fps = {name: pipe.config.fps for name, pipe in pipelines.items()}
        self.on_device_error: Callable[[BaseException], None] = lambda error: None

    def warm_up(self) -> None:
        """Where steps are captured, on a CUDA device, capture those of each model's defaults; not the passes of whole
        grids, most of which take far longer than their launches."""
        for pipe in self._pipelines.values():
            if pipe.captures and not pipe.abilities.in_maps:
                pipe.warm_up()

    def check(self, request: VideoRequest) -> None:
        """Refuse a request that the model does not support or the limits do not allow, before any computation.

        Raises:
            Refused: with the reason.
        """
        limits, model = self.limits, request.model
        check_types(request)
        if model not in self._pipelines:
            raise Refused(f"unknown model {model[:80]!r}: choose among {', '.join(self._pipelines)}", "model")
        pipe, info = self._pipelines[model], self.models[model]
        check_prompt(model, request.prompt)
        check_text("prompt", request.prompt, limits)
        if request.image is not None:
            check_pixels("image", request.image, limits)
        if request.num_frames not in (None, *info.frame_counts):
            counts = ", ".join(map(str, sorted(info.frame_counts)))
            raise Refused(
                f"{model} does not generate {request.num_frames} frames: choose among {counts}", "num_frames"
            )
        size = asked_size(request, info.sizes[0])
        check_size(model, size, info)
        check_decoding(model, request.decoding, pipe, info, size, limits)

    def run(self, request: VideoRequest) -> Generator[VideoProgress, None, None]:
        """Yield the video whenever there are more frames, and at the end; before it begins, `WAITING` every second.
        Closing the iterator stops the generation.

        Raises:
            Refused: if the model does not support the request, or the limits do not allow it.
        """
        self.check(request)
        while not self._lock.acquire(timeout=PAUSE):
            yield WAITING
        try:
            yield from _generate(self._pipelines[request.model], request, self._lora)
        except torch.AcceleratorError as error:
            self.on_device_error(error)
            raise
        finally:
            self._lock.release()


def _generate(pipe: ARPipeline, request: VideoRequest, lora: list[str]) -> Iterator[VideoProgress]:
    events: queue.SimpleQueue[VideoProgress | Exception] = queue.SimpleQueue()
    stopped = threading.Event()

    def work() -> None:
        try:
            _call(pipe, request, lora, events, stopped)
        except _Stopped:
            pass
        # Raised where the events are read.
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


class _Stopped(Exception):
    """Nobody reads the events of a video any more."""


class _Maps:
    """The frames of a video that is generated map after map: those whose maps are complete."""

    def __init__(self, pipe):
        self.frames: list[Image.Image] = []
        self.appeared: list[int] = []
        self._pipe, self._stream = pipe, pipe.vq.stream()

    def _show(self, maps: torch.LongTensor, passes: int) -> None:
        """Decode the next maps [1, t, h, w]."""
        self.frames += self._pipe.to_images(self._pipe.current_call, self._stream.decode(maps).float())[0]
        self.appeared += [passes] * maps.shape[1]

    def update(self, passes: int, tensors: dict[str, torch.Tensor]) -> None:
        call = self._pipe.current_call
        given = call.given_tokens.shape[1]
        if not self.appeared and given:
            self._show(call.given_tokens, 0)
        complete = int(call.layout.to_places(tensors["decided"])[0].flatten(1).all(1).long().cumprod(0).sum())
        shown = len(self.appeared) - given
        if complete > shown:
            self._show(call.layout.to_places(tensors["tokens"])[:, shown:complete], passes)


class _Clips:
    """The frames of a video that is generated clip after clip, from coarse to fine: small ones of all clips so far,
    one per second, as often as they take little of the time."""

    def __init__(self, pipe):
        self.frames: list[Image.Image] = []
        self.appeared: list[int] = []
        self._pipe, self._began, self._spent = pipe, time.perf_counter(), 0.0

    def update(self, passes: int, tensors: dict[str, torch.Tensor]) -> None:
        pipe, call, now = self._pipe, self._pipe.current_call, time.perf_counter()
        if call.model.film[call.model.fed[passes - 1]].last:
            self.appeared.append(passes)
        if self._spent > PREVIEWS * (now - self._began):
            return
        pixels = pipe.preview(call, tensors["tokens"]).float()
        self.frames = pipe.shown_frames(call, pipe.to_images(call, pixels)[0])
        self._spent += time.perf_counter() - now


def _call(pipe, request: VideoRequest, lora: list[str], events: queue.SimpleQueue, stopped: threading.Event) -> None:
    preview, began = (_Clips if pipe.abilities.in_maps else _Maps)(pipe), time.perf_counter()

    def on_step(pipe, step: int, passes: int, tensors: dict[str, torch.Tensor]) -> None:
        if stopped.is_set():
            # An interrupted call would decode the video so far.
            raise _Stopped
        preview.update(passes, tensors)
        decided, work = tensors["decided"], float(tensors["work"])
        seconds = time.perf_counter() - began
        progress = (int(decided.sum()), decided.numel(), work, seconds)
        events.put(VideoProgress(list(preview.frames), passes, list(preview.appeared), *progress))

    output = pipe(
        request.prompt,
        image=request.image,
        num_frames=request.num_frames,
        height=request.height,
        width=request.width,
        decoding=request.decoding,
        generator=torch.Generator().manual_seed(request.seed),
        callback_on_step_end=on_step,
        callback_on_step_end_tensor_inputs=["tokens", "decided", "work"],
    )
    decoding = request.decoding or decoding_to_text(pipe.decoding)
    passes, tokens, seconds = output.stats.forward_passes, _count(output.tokens), time.perf_counter() - began
    given = {"model": request.model, "lora": lora, "prompt": request.prompt, "decoding": decoding}
    given["made_from"] = [] if request.image is None else ["image"]
    [note], _ = notes_of(pipe, given, [{}], output.frames, output.seeds, False)
    done = (decoding, output.stats.exact)
    events.put(VideoProgress(output.frames[0], passes, preview.appeared, tokens, tokens, 1.0, seconds, done, note))


def _count(tokens: Tokens) -> int:
    """The tokens of one video."""
    return sum(part[0].numel() for part in (tokens if isinstance(tokens, list) else [tokens]))
