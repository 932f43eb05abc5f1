"""The tab that shows videos while they are generated: frame by frame, then as a film."""

from collections.abc import Iterator
from contextlib import closing

import gradio as gr
from PIL import Image

from ...media.writing import own_path, write_video
from ..engine.types import Refused
from ..engine.videos import WAITING, VideoMaker, VideoProgress, VideoRequest
from . import markup
from .controls import AT_ONCE, GENERATES, chosen, decoding_choices, model_input, refusal, seed_input
from .pictures import saved


EXAMPLES = [
    "a red heart, moving right",
    "a soccer ball, bouncing",
    "a cat, growing",
    "a rocket, moving up and shrinking",
]
# How many frames of a finished video are shown one by one.
SHOWN = 20
EMPTY = '<p class="faint">Frames appear as soon as they are decided.</p>'


class VideoTab:
    """The tab. When a page opens it first, it generates the first example."""

    def __init__(self, maker: VideoMaker, tab: gr.Tab):
        self._maker = maker
        first = next(iter(maker.models))
        # What the tab generates when it is opened, and the finished video once there is one.
        self._first, self._first_result = VideoRequest(first, EXAMPLES[0]), None
        self._opened = gr.State(False)
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=300, elem_classes="controls"):
                model = model_input(maker, "Makes the video.")
                prompt = gr.Textbox(
                    EXAMPLES[0], label="Prompt", info="What the video shows, and how it moves.", max_lines=1
                )
                with gr.Row():
                    self._start = gr.Button("Generate", variant="primary", elem_id="make-video")
                    self._stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop-video")
                examples = gr.Examples(EXAMPLES, prompt, label="Try")
                with gr.Row(elem_classes="settings"):
                    decoding = gr.Dropdown(
                        decoding_choices(maker, first),
                        value=maker.models[first].decoding,
                        label="Decoding",
                        info="How the tokens are decided.",
                        filterable=False,
                        scale=3,
                    )
                    seed = seed_input("Same seed, same video.")
                    length = gr.Dropdown(
                        **length_of(maker, first),
                        label="Length",
                        info="Longer takes longer.",
                        filterable=False,
                        min_width=100,
                    )
                image = gr.Image(
                    type="pil",
                    image_mode=None,
                    label="First frame: the video continues it",
                    height=200,
                    elem_id="first-frame",
                    elem_classes="settings",
                )
            with gr.Column(scale=5, min_width=300):
                self._film = gr.Image(
                    visible=False,
                    show_label=False,
                    buttons=[],
                    interactive=False,
                    height=320,
                    elem_id="video",
                    elem_classes="pixels",
                )
                self._frames = gr.Gallery(
                    show_label=False,
                    format="png",
                    columns=4,
                    height="auto",
                    interactive=False,
                    buttons=[],
                    elem_id="frames",
                    elem_classes="pixels",
                )
                self._status = gr.HTML(EMPTY, elem_id="video-status")
                self._download = gr.DownloadButton("Download", size="sm", visible=False, elem_id="download-video")

        ended = [self._status, self._start, self._stop]
        outputs = [self._opened, self._film, self._frames, self._download, *ended]
        opening = tab.select(self._open, self._opened, outputs, **GENERATES)
        asked = [model, prompt, decoding, seed, image, length]
        runs = [
            trigger(self._generate, asked, outputs, cancels=[opening], **GENERATES)
            for trigger in (self._start.click, prompt.submit, examples.load_input_event.success)
        ]
        self._stop.click(self._stopped, None, ended, cancels=[opening, *runs], **AT_ONCE)
        model.input(self._form_of, model, [decoding, length], **AT_ONCE)

    def _form_of(self, model: str) -> tuple[gr.Dropdown, gr.Dropdown]:
        decoding = gr.Dropdown(decoding_choices(self._maker, model), value=self._maker.models[model].decoding)
        return decoding, gr.Dropdown(**length_of(self._maker, model))

    def _stopped(self) -> dict:
        return {self._status: markup.STOPPED, **self._buttons(running=False)}

    def _buttons(self, running: bool) -> dict:
        return {self._start: gr.Button(visible=not running), self._stop: gr.Button(visible=running)}

    def _open(self, was_opened: bool) -> Iterator[dict]:
        if was_opened:
            # Gradio would empty the outputs of a function that yields nothing.
            updates = [{}]
        elif self._first_result is not None:
            updates = [self._finished(self._first, self._first_result)]
        else:
            updates = self._run(self._first)
        for update in updates:
            yield {self._opened: True, **update}

    def _generate(self, model, prompt, decoding, seed, image, length) -> Iterator[dict]:
        asked = chosen(self._maker.models[model], decoding)
        request = VideoRequest(model, prompt or "", seed or 0, asked, image, int(length))
        for update in self._run(request):
            yield {self._opened: True, **update}

    def _run(self, request: VideoRequest) -> Iterator[dict]:
        hidden = {self._film: gr.Image(visible=False), self._download: gr.DownloadButton(visible=False)}
        yield {**hidden, self._frames: [], self._status: EMPTY, **self._buttons(running=True)}
        shown = []
        try:
            with closing(self._maker.run(request)) as events:
                for now in events:
                    if now.finished is not None:
                        if request is self._first:
                            self._first_result = now
                        yield self._finished(request, now)
                        return
                    new = {} if now.frames == shown else {self._frames: [*map(saved, now.frames)]}
                    shown = now.frames
                    yield {self._status: status_of(now), **new}
        except Exception as error:
            yield self._buttons(running=False)
            if isinstance(error, Refused):
                raise refusal(str(error)) from error
            raise

    def _finished(self, request: VideoRequest, now: VideoProgress) -> dict:
        path = own_path(f"{request.prompt} {request.seed}", ".webp", self._film.GRADIO_CACHE)
        frames, text = [enlarged(frame) for frame in now.frames], now.note if self._maker.limits.metadata else None
        write_video(frames, path, self._maker.fps[request.model], text)
        return {
            self._film: gr.Image(path, visible=True),
            self._frames: [*map(saved, some(now.frames))],
            self._status: status_of(now),
            self._download: gr.DownloadButton(value=path, visible=True),
            **self._buttons(running=False),
        }


def length_of(maker: VideoMaker, model: str) -> dict:
    """The choices of the length of a video, numbers of frames shown as seconds, if a model has several."""
    counts, fps = maker.models[model].frame_counts, maker.fps[model]
    choices = [(f"{(count - 1) / fps:g} s" if count > 1 else "one image", str(count)) for count in sorted(counts)]
    return {"choices": choices, "value": str(counts[0]), "visible": len(counts) > 1}


def some(frames: list[Image.Image]) -> list[Image.Image]:
    """At most `SHOWN` frames of a video, evenly spaced."""
    return frames[:: -(-len(frames) // SHOWN)]


def enlarged(frame: Image.Image) -> Image.Image:
    """A small frame enlarged without smoothing, because browsers would blur it."""
    factor = max(1, 320 // max(frame.size))
    return frame.resize((frame.width * factor, frame.height * factor), Image.Resampling.NEAREST)


def status_of(now: VideoProgress) -> str:
    """The progress of a video, and the forward passes after which its frames appeared."""
    if now is WAITING:
        return '<p class="faint">Another video is being generated: this one waits for it.</p>'
    each = now.decided / max(now.passes, 1)
    text = (
        f"{now.passes} forward passes · {now.decided} of {now.tokens} tokens · {each:.1f} tokens per forward pass · "
        f"{now.work:.0%} of the work · {now.seconds:.2f} s"
    )
    appeared = ", ".join(map(str, now.appeared)) or "none yet"
    which = "" if now.finished is None else f"{now.finished[0]} {markup.badge(now.finished[1])} · "
    frames = f'<p class="faint">{which}frames appeared after forward pass {appeared}</p>'
    return f'<div class="status"><p>{text}</p>{frames}</div>'
