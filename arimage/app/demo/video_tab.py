"""The tab that shows videos while they are generated: frame by frame, then as a film."""

from collections.abc import Iterator
from contextlib import closing

import gradio as gr
from PIL import Image

from ...media.writing import own_path, write_video
from ..engine.types import Refused
from ..engine.videos import VideoMaker, VideoProgress, VideoRequest
from . import markup
from .controls import AT_ONCE, GENERATES, chosen, decoding_choices, refusal
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


def video_tab(maker: VideoMaker, tab: gr.Tab) -> None:
    """Build the tab. When a page opens it first, it generates the first example."""
    first = next(iter(maker.models))
    # The finished video of the first example.
    example: list[VideoProgress] = []
    opened = gr.State(False)
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300, elem_classes="controls"):
            model = gr.Dropdown(
                list(maker.models),
                value=first,
                label="Model",
                info="Makes the video.",
                filterable=False,
                visible=len(maker.models) > 1,
            )
            prompt = gr.Textbox(
                EXAMPLES[0], label="Prompt", info="What the video shows, and how it moves.", max_lines=1
            )
            with gr.Row():
                start = gr.Button("Generate", variant="primary", elem_id="make-video")
                stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop-video")
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
                seed = gr.Number(0, label="Seed", info="Same seed, same video.", precision=0, min_width=80)
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
            film = gr.Image(
                visible=False,
                show_label=False,
                buttons=[],
                interactive=False,
                height=320,
                elem_id="video",
                elem_classes="pixels",
            )
            frames = gr.Gallery(
                show_label=False,
                format="png",
                columns=4,
                height="auto",
                interactive=False,
                buttons=[],
                elem_id="frames",
                elem_classes="pixels",
            )
            status = gr.HTML(EMPTY, elem_id="video-status")
            download = gr.DownloadButton("Download", size="sm", visible=False, elem_id="download-video")

    def buttons(running: bool) -> dict:
        return {start: gr.Button(visible=not running), stop: gr.Button(visible=running)}

    def finished(request: VideoRequest, now: VideoProgress) -> dict:
        path = own_path(f"{request.prompt} {request.seed}", ".webp", film.GRADIO_CACHE)
        text = now.note if maker.limits.metadata else None
        write_video([enlarged(frame) for frame in now.frames], path, maker.fps[request.model], text)
        shown = {film: gr.Image(path, visible=True), download: gr.DownloadButton(value=path, visible=True)}
        return {**shown, frames: [*map(saved, some(now.frames))], status: status_of(now), **buttons(False)}

    def run(request: VideoRequest, keep: list[VideoProgress]) -> Iterator[dict]:
        hidden = {film: gr.Image(visible=False), download: gr.DownloadButton(visible=False)}
        yield {**hidden, frames: [], status: EMPTY, **buttons(True)}
        shown = []
        try:
            with closing(maker.run(request)) as events:
                for now in events:
                    if now.finished is not None:
                        keep[:] = [now]
                        yield finished(request, now)
                        return
                    new = {} if now.frames == shown else {frames: [*map(saved, now.frames)]}
                    shown = now.frames
                    yield {status: status_of(now), **new}
        except Exception as error:
            yield buttons(False)
            if isinstance(error, Refused):
                raise refusal(str(error)) from error
            raise

    def generate(model, prompt, decoding, seed, image, length) -> Iterator[dict]:
        asked = chosen(maker.models[model], decoding)
        request = VideoRequest(model, prompt or "", seed or 0, asked, image, int(length))
        for update in run(request, []):
            yield {opened: True, **update}

    def open_tab(was_opened: bool) -> Iterator[dict]:
        if was_opened:
            # Gradio would empty the outputs of a function that yields nothing.
            yield {opened: True}
            return
        request = VideoRequest(first, EXAMPLES[0], 0, None, None)
        for update in [finished(request, example[0])] if example else run(request, example):
            yield {opened: True, **update}

    outputs = [opened, film, frames, status, download, start, stop]
    opening = tab.select(open_tab, opened, outputs, **GENERATES)
    asked = [model, prompt, decoding, seed, image, length]
    runs = [
        trigger(generate, asked, outputs, cancels=[opening], **GENERATES)
        for trigger in (start.click, prompt.submit, examples.load_input_event.success)
    ]
    ended = [status, start, stop]
    stop.click(lambda: {status: markup.STOPPED, **buttons(False)}, None, ended, cancels=[opening, *runs], **AT_ONCE)
    model.input(
        lambda name: (
            gr.Dropdown(decoding_choices(maker, name), value=maker.models[name].decoding),
            gr.Dropdown(**length_of(maker, name)),
        ),
        model,
        [decoding, length],
        **AT_ONCE,
    )


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
    each = now.decided / max(now.passes, 1)
    text = (
        f"{now.passes} forward passes · {now.decided} of {now.tokens} tokens · {each:.1f} tokens per forward pass · "
        f"{now.work:.0%} of the work · {now.seconds:.2f} s"
    )
    appeared = ", ".join(map(str, now.appeared)) or "none yet"
    which = "" if now.finished is None else f"{now.finished[0]} {markup.badge(now.finished[1])} · "
    frames = f'<p class="faint">{which}frames appeared after forward pass {appeared}</p>'
    return f'<div class="status"><p>{text}</p>{frames}</div>'
