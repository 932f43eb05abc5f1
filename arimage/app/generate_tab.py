"""The tab that shows images while they are generated."""

from collections.abc import Callable, Iterator

import gradio as gr

from . import markup
from .engine import Engine
from .form import (
    AT_ONCE,
    EXAMPLES,
    GENERATES,
    SAMPLING,
    DecodingChoice,
    GenerateAndStop,
    Subject,
    chosen,
    events,
    random_seed,
)
from .pictures import stamped, write_download
from .protocol import Progress, Request
from .ticket import Ticket


def preview_every(engine: Engine, model: str) -> int:
    """Forward passes between partial images."""
    return 1 if engine.models[model].grid is None else 4


def generate_tab(engine: Engine) -> gr.State:
    """Build the tab. Returns its last run: None, or a request and its result."""
    info = next(iter(engine.models.values()))
    with gr.Row(equal_height=False):
        with gr.Column(scale=4, min_width=300):
            subject = Subject(engine)
            decoding = DecodingChoice(engine, subject)
            decoding.about.render()
            with gr.Row():
                seed = gr.Number(0, label="Seed", precision=0, min_width=120)
                count = gr.Slider(1, engine.limits.images, value=1, step=1, label="Images", min_width=120, buttons=[])
            with gr.Accordion("Advanced", open=False), gr.Row():
                sampling = [
                    gr.Number(
                        info.sampling["guidance_scale"], label="Guidance", info="1 is off", step=0.1, min_width=150
                    ),
                    gr.Number(
                        info.sampling["temperature"], label="Temperature", info="Above 0", step=0.1, min_width=150
                    ),
                    gr.Number(info.sampling["top_k"], label="Top-k", info="0 is off", precision=0, min_width=150),
                    gr.Number(info.sampling["top_p"], label="Top-p", info="1 is off", step=0.05, min_width=150),
                ]
            with gr.Row():
                actions = GenerateAndStop(engine, "Generate", "generate", ("Random seed",))
            gr.Examples(EXAMPLES, subject.prompt, label="Try")
        with gr.Column(scale=5, min_width=300):
            gallery = gr.Gallery(
                show_label=False,
                format="png",
                height=480,
                columns=1,
                interactive=False,
                buttons=["download", "fullscreen"],
                elem_id="pictures",
                elem_classes="pixels",
            )
            status = gr.HTML(markup.EMPTY, elem_id="status")
            with gr.Row():
                again = gr.Button("Same seed again", size="sm", interactive=False, elem_id="again", min_width=120)
                download = gr.DownloadButton(
                    "Download", size="sm", interactive=False, elem_id="download", min_width=120
                )
    last = gr.State()
    inputs = [*subject.inputs, decoding.dropdown, seed, count, *sampling]
    outputs = [gallery, status, download, again, last, seed, *actions.buttons]

    def generate(submit: Callable[[Request], Ticket], request: Request) -> Iterator[dict]:
        columns = 1 if request.count == 1 else 2 if request.count <= 4 else 4
        for event in events(submit, request):
            if isinstance(event, Progress):
                update = {status: markup.progress(event, request.count), **actions.busy()}
                if event.previews:
                    update[gallery] = gr.Gallery(event.previews, columns=columns)
                yield update
            else:
                images = stamped(event)
                name = f"{request.prompt or f'class {request.class_label}'} {request.seed}"
                path = write_download(images, name, gallery.GRADIO_CACHE)
                yield {
                    gallery: gr.Gallery(images, columns=columns),
                    status: markup.finished(event),
                    download: gr.DownloadButton(value=path, interactive=True),
                    again: gr.Button(interactive=True),
                    last: (request, event),
                    **actions.idle(),
                }

    def generate_form(
        page: gr.Request, model, prompt, class_label, decoding, seed, count, *sampling
    ) -> Iterator[dict]:
        request = Request(
            **subject.condition(model, prompt, class_label),
            decoding=chosen(engine.models[model], decoding),
            seed=seed,
            count=count,
            preview_every=preview_every(engine, model),
            **dict(zip(SAMPLING, sampling, strict=True)),
        )
        yield from actions.run(page, status, lambda submit: generate(submit, request))

    def generate_with_random_seed(page: gr.Request, *values) -> Iterator[dict]:
        values = dict(zip(inputs, values, strict=True)) | {seed: random_seed()}
        for update in generate_form(page, *values.values()):
            yield {seed: values[seed], **update}

    def generate_again(page: gr.Request, last) -> Iterator[dict]:
        yield from actions.run(page, status, lambda submit: generate(submit, last[0]))

    gr.on([actions.start.click, subject.prompt.submit], generate_form, inputs, outputs, **GENERATES)
    actions.others[0].click(generate_with_random_seed, inputs, outputs, **GENERATES)
    # On a narrow screen the image is below the controls.
    for button in (actions.start, *actions.others):
        button.click(None, js="() => document.getElementById('again').scrollIntoView({block: 'nearest'})", **AT_ONCE)
    again.click(generate_again, last, outputs, **GENERATES)

    def on_model(model: str) -> dict:
        defaults = [engine.models[model].sampling[name] for name in SAMPLING]
        return subject.visibility(model) | decoding.choices(model) | dict(zip(sampling, defaults, strict=True))

    subject.model.input(
        on_model, subject.model, [*subject.inputs[1:], decoding.dropdown, decoding.about, *sampling], **AT_ONCE
    )
    return last
