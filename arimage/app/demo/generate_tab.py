"""The tab that shows images while they are generated."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args

import gradio as gr

from ...decoding import Order
from ...media.film import write_film
from ..engine.engine import Engine
from ..engine.models import ModelInfo
from ..engine.ticket import Ticket
from ..engine.types import SAMPLING, Progress, Request, Result
from . import markup
from .controls import (
    AT_ONCE,
    EXAMPLES,
    GENERATES,
    DecodingChoice,
    GenerateAndStop,
    Subject,
    chosen,
    events,
    random_seed,
    refusal,
)
from .links import from_query, to_query
from .pictures import saved, stamped, write_download


# The address of the page is the link to its image. Without access to the clipboard, the link is shown.
SHOW_LINK = "(link) => link && history.replaceState(null, '', link)"
COPY_LINK = """async (link) => {
    history.replaceState(null, "", link);
    try { await navigator.clipboard.writeText(location.href); }
    catch { prompt("The link to this image", location.href); }
    return "Link copied";
}"""
# On a small screen the image may be out of sight.
SHOW_IMAGE = """() => {
    const image = document.getElementById("pictures"), {top, bottom} = image.getBoundingClientRect();
    if (top < 0 || bottom > innerHeight) image.scrollIntoView({block: "start"});
}"""


def preview_every(engine: Engine, model: str) -> int:
    """Forward passes between partial images."""
    return 1 if engine.models[model].grid is None else 4


class GenerateTab:
    """The tab.

    Attributes:
        subject: its model and its prompt or class.
        last: the request and result of its last run, or None.
        outputs: the components that its runs change.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        # The finished image of the address without settings.
        self._first: Result | None = None
        info = next(iter(engine.models.values()))
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=300, elem_classes="controls"):
                with gr.Column(min_width=300):
                    with gr.Row():
                        self.subject = Subject(engine)
                    with gr.Row():
                        self._actions = GenerateAndStop(engine, "Generate", "generate", ("Random seed",))
                with gr.Column(min_width=300, elem_classes="settings"):
                    gr.Examples(EXAMPLES, self.subject.prompt, label="Try")
                    self._decoding = DecodingChoice(engine, self.subject)
                    self._decoding.about.render()
                    with gr.Row():
                        self._seed = gr.Number(0, label="Seed", precision=0, min_width=120)
                        self._count = gr.Slider(
                            1,
                            engine.limits.images,
                            value=1,
                            step=1,
                            precision=0,
                            label="Images",
                            min_width=120,
                            buttons=[],
                        )
                    self._references = gr.Gallery(
                        **_references(info),
                        interactive=True,
                        label="References",
                        type="pil",
                        format="png",
                        height=140,
                        columns=4,
                        buttons=[],
                        elem_id="references",
                    )
                    with gr.Accordion("Advanced", open=False), gr.Row():
                        self._order = gr.Dropdown(
                            list(get_args(Order)),
                            value=info.order,
                            label="Order of the tokens",
                            visible=info.order is not None,
                            filterable=False,
                            min_width=150,
                        )
                        self._sampling = [
                            gr.Number(
                                info.sampling[name], label=label, info=hint, step=step, precision=digits, min_width=150
                            )
                            for name, label, hint, step, digits in (
                                ("guidance_scale", "Guidance", "1 is off", 0.1, None),
                                ("temperature", "Temperature", "Above 0", 0.1, None),
                                ("top_k", "Top-k", "0 is off", 1, 0),
                                ("top_p", "Top-p", "1 is off", 0.05, None),
                                ("min_p", "Min-p", "0 is off", 0.01, None),
                            )
                        ]
                        self._inference_steps = gr.Number(
                            **_inference_steps(info), label="Decoder steps", precision=0, min_width=150
                        )
            with gr.Column(scale=5, min_width=300):
                self._gallery = gr.Gallery(
                    show_label=False,
                    format="png",
                    height=480,
                    columns=1,
                    interactive=False,
                    buttons=["download", "fullscreen"],
                    elem_id="pictures",
                    elem_classes="pixels",
                )
                self._status = gr.HTML(markup.EMPTY, elem_id="status")
                with gr.Row():
                    after = {"size": "sm", "interactive": False, "min_width": 100}
                    self._again = gr.Button("Same seed again", elem_id="again", **after)
                    self._film = gr.Button("Film", elem_id="make-film", **after)
                    self._copy = gr.Button("Copy link", elem_id="copy-link", **after)
                    self._download = gr.DownloadButton("Download", elem_id="download", **after)
        self.last = gr.State()
        self._link = gr.Textbox(visible=False)
        shown = [self._gallery, self._status, self._download, *self._actions.buttons]
        finished = [*shown, self._again, self._film, self._copy, self._link, self.last, self._seed]
        self._inputs = [
            *self.subject.inputs,
            self._decoding.dropdown,
            self._seed,
            self._count,
            self._references,
            self._order,
            self._inference_steps,
            *self._sampling,
        ]
        fields = [*self._inputs, self._decoding.about]
        self.outputs = list(dict.fromkeys([*finished, *fields]))

        # Before the runs themselves, because the page runs them in this order.
        for button in (self._actions.start, *self._actions.others, self._again, self._film):
            button.click(None, js=SHOW_IMAGE, **AT_ONCE)
        for trigger in (self._actions.start.click, self.subject.prompt.submit):
            self.generate_on(trigger)
        self.generate_on(self._actions.others[0].click, self._generate_with_random_seed)
        self._again.click(self._generate_again, self.last, finished, **GENERATES)
        self._film.click(self._generate_film, self.last, shown, **GENERATES)
        self._copy.click(None, self._link, self._copy, js=COPY_LINK, **AT_ONCE)
        self.subject.model.input(self._on_model, self.subject.model, fields, **AT_ONCE)

    def generate_on(self, trigger: Callable, generate: Callable | None = None) -> None:
        """Run `generate`, by default the form, on a Gradio event. Afterwards the page's address is the link to the
        image.

        Args:
            trigger: registers a listener, as `button.click` does.
        """
        run = trigger(generate or self._generate_form, self._inputs, self.outputs, **GENERATES)
        run.success(None, self._link, js=SHOW_LINK, **AT_ONCE)

    def open_page(self, page: gr.Request) -> Iterator[dict]:
        """Generate the image of the link that opened the page, or else the first example."""
        engine = self._engine
        request = from_query(page.query_params, engine)
        if request is None:
            model = next(iter(engine.models))
            subject = self.subject.condition(model, EXAMPLES[0], 0)
            first = Request(**subject, preview_every=preview_every(engine, model))
            if self._first is not None:
                yield self._finished(first, self._first)
                return
            for update in self._actions.run(page, self._status, lambda submit: self._generate(submit, first)):
                if self.last in update:
                    self._first = update[self.last][1]
                yield update
        else:
            request = replace(request, preview_every=preview_every(engine, request.model))
            yield self._fields_of(request)
            yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, request))

    def _fields_of(self, request: Request) -> dict:
        """Updates that fill the form with a request."""
        info = self._engine.models[request.model]
        given = {
            component: getattr(request, name)
            for component, name in zip(self._sampling, SAMPLING, strict=True)
            if getattr(request, name) is not None
        }
        return {
            **self._on_model(request.model),
            **self.subject.show(request.model, request.prompt if info.classes is None else request.class_label),
            **self._decoding.choices(request.model, request.decoding),
            **given,
            self.subject.model: request.model,
            self._seed: request.seed,
            self._count: request.count,
            **({} if request.order is None else {self._order: request.order}),
            **({} if request.num_inference_steps is None else {self._inference_steps: request.num_inference_steps}),
        }

    def _generate(self, submit: Callable[[Request], Ticket], request: Request) -> Iterator[dict]:
        for event in events(submit, request):
            if isinstance(event, Progress):
                yield self._progress(request, event)
            else:
                yield self._finished(request, event)

    def _progress(self, request: Request, now: Progress) -> dict:
        update = {self._status: markup.progress(now, request.count), **self._actions.busy()}
        if now.previews:
            update[self._gallery] = gr.Gallery([*map(saved, now.previews)], columns=_columns(request))
        return update

    def _finished(self, request: Request, result: Result) -> dict:
        images = stamped(result)
        path = write_download(images, _name(request), self._gallery.GRADIO_CACHE)
        return {
            self._gallery: gr.Gallery([*map(saved, images)], columns=_columns(request)),
            self._status: markup.finished(result),
            self._download: gr.DownloadButton("Download", value=path, interactive=True),
            self._again: gr.Button(interactive=True),
            self._film: gr.Button(interactive=True),
            self._copy: gr.Button("Copy link", interactive=True),
            self._link: to_query(result, self._engine),
            self.last: (request, result),
            **self._actions.idle(),
        }

    def _generate_form(
        self, page: gr.Request, model, prompt, class_label, decoding, seed, count, references, order, steps, *sampling
    ) -> Iterator[dict]:
        request = Request(
            **self.subject.condition(model, prompt, class_label),
            decoding=chosen(self._engine.models[model], decoding),
            seed=seed,
            count=count,
            references=tuple(image for image, _ in references or []),
            order=order,
            num_inference_steps=steps,
            preview_every=preview_every(self._engine, model),
            **dict(zip(SAMPLING, sampling, strict=True)),
        )
        yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, request))

    def _generate_with_random_seed(self, page: gr.Request, *values) -> Iterator[dict]:
        values = dict(zip(self._inputs, values, strict=True)) | {self._seed: random_seed()}
        for update in self._generate_form(page, *values.values()):
            yield {self._seed: values[self._seed], **update}

    def _generate_again(self, page: gr.Request, last: tuple[Request, Result] | None) -> Iterator[dict]:
        request = last_of(last)[0]
        yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, request))

    def _generate_film(self, page: gr.Request, last: tuple[Request, Result] | None) -> Iterator[dict]:
        """Generate the first image of the last run again, as a film."""
        request = replace(last_of(last)[0], count=1, film=True)

        def generate(submit: Callable[[Request], Ticket]) -> Iterator[dict]:
            for event in events(submit, request):
                if isinstance(event, Progress):
                    yield self._progress(request, event)
                elif event.film is not None:
                    path = write_film(event.film, _name(request), self._gallery.GRADIO_CACHE)
                    yield {
                        self._gallery: gr.Gallery([path], columns=1),
                        self._status: markup.finished(event),
                        self._download: gr.DownloadButton("Download film", value=path),
                        **self._actions.idle(),
                    }

        yield from self._actions.run(page, self._status, generate)

    def _on_model(self, model: str) -> dict:
        info = self._engine.models[model]
        defaults = [info.sampling[name] for name in SAMPLING]
        update = self.subject.show(model) | self._decoding.choices(model)
        update[self._order] = gr.Dropdown(value=info.order, visible=info.order is not None)
        update[self._inference_steps] = gr.Number(**_inference_steps(info))
        update[self._references] = gr.Gallery(**_references(info))
        return update | dict(zip(self._sampling, defaults, strict=True))


def last_of(last: tuple[Request, Result] | None) -> tuple[Request, Result]:
    """The last run of a page.

    Raises:
        gr.Error: if there was none, or the page is so old that its run is forgotten.
    """
    if last is None:
        raise refusal("no image has been generated yet: generate one in the tab Generate")
    return last


def _inference_steps(info: ModelInfo) -> dict:
    """The default number of denoising steps, and whether the model has any."""
    steps = info.sampling.get("num_inference_steps")
    return {"value": steps, "visible": steps is not None}


def _references(info: ModelInfo) -> dict:
    """No images yet, and whether the model reads any."""
    return {"value": None, "visible": info.references > 0}


def _columns(request: Request) -> int:
    return 1 if request.count == 1 else 2 if request.count <= 4 else 4


def _name(request: Request) -> str:
    return f"{request.prompt or f'class {request.class_label}'} {request.seed}"
