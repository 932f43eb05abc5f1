"""The tab that shows images while they are generated."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl

import gradio as gr
from gradio.events import Dependency
from PIL import Image

from ...media.film import write_film
from ..engine.engine import Engine
from ..engine.models import ModelInfo
from ..engine.ticket import Ticket
from ..engine.types import Progress, Request, Result
from ..engine.uploads import reduce_uploads
from . import markup
from .controls import AT_ONCE, GENERATES, GenerateAndStop, Subject, events, random_seed, refusal
from .links import REFERENCES, from_query, query_of_picture, to_query
from .pictures import saved, thumbnail, write_download
from .settings import Settings


# The address of the page is the link to its image. Without access to the clipboard, the link is shown.
SHOW_LINK = """(link, picture) => {
    if (!link) return;
    history.replaceState(null, "", link);
    dispatchEvent(new CustomEvent("arimage-made", {detail: {link, picture}}));
}"""
COPY_LINK = """async (link) => {
    history.replaceState(null, "", link);
    try { await navigator.clipboard.writeText(location.href); }
    catch { prompt("The link to this image", location.href); }
    return "Link copied";
}"""
# On a small screen the image may be out of sight, or the two lines of status below it, which are empty at first.
SHOW_IMAGE = """() => {
    const image = document.getElementById("pictures"), {top, bottom} = image.getBoundingClientRect();
    if (top < 0 || bottom + 80 > innerHeight) image.scrollIntoView({block: "start"});
}"""


def preview_every(engine: Engine, model: str) -> int:
    """Forward passes between partial images."""
    return 1 if engine.models[model].grid is None else 4


def tries(info: ModelInfo, examples: tuple[str, ...]) -> bool:
    """Whether these are the prompts to try with a model."""
    return info.classes is None and tuple(info.examples) == examples


class GenerateTab:
    """The tab.

    Attributes:
        subject: its model and its prompt or class.
        last: the request and the first image of its last run, or None.
        outputs: the components that its runs change.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        with gr.Row(equal_height=False):
            with gr.Column(scale=4, min_width=300, elem_classes="controls"):
                with gr.Column(min_width=300):
                    with gr.Row():
                        self.subject = Subject(engine)
                    with gr.Row():
                        self._actions = GenerateAndStop(engine, "Generate", "generate", ("Random seed",))
                with gr.Column(min_width=300, elem_classes="settings"):
                    first = next(iter(engine.models.values()))
                    # One for all models with the same prompts: the one of the model is seen.
                    self._examples = {
                        its: gr.Examples([*its], self.subject.prompt, label="Try", visible=tries(first, its))
                        for its in dict.fromkeys(tuple(info.examples) for info in engine.models.values())
                    }
                    self._settings = Settings(engine, self.subject)
                    self._picture_in = gr.File(
                        label="Fill the form from a picture of arimage",
                        file_types=["image"],
                        height=100,
                        elem_id="from-picture",
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
                self._history = gr.HTML(
                    js_on_load=Path(__file__).with_name("history.js").read_text(encoding="utf-8"), elem_id="history"
                )
        # What the address without settings generates, and its result once there is one.
        model, info = next(iter(engine.models.items()))
        subject = self.subject.condition(model, info.examples[0], "0")
        self._first = Request(**subject, preview_every=preview_every(engine, model))
        self._first_result: Result | None = None
        self.last = gr.State()
        # The link to the finished images, and a small picture of the first.
        self._link, self._picture = gr.Textbox(visible=False), gr.Textbox(visible=False)
        shown = [self._gallery, self._status, self._download, *self._actions.buttons]
        made = [self._link, self._picture, self.last]
        finished = [*shown, self._again, self._film, self._copy, *made, self._settings.seed]
        self._inputs = [*self.subject.inputs, *self._settings.inputs]
        fields = [*self.subject.inputs, *(one.dataset for one in self._examples.values()), *self._settings.outputs]
        self.outputs = list(dict.fromkeys([*finished, *fields]))

        # Before the runs themselves, because the page runs them in this order.
        for button in (self._actions.start, *self._actions.others, self._again, self._film):
            button.click(None, js=SHOW_IMAGE, **AT_ONCE)
        self._picture_in.upload(None, js=SHOW_IMAGE, **AT_ONCE)
        clicked = [one.load_input_event.success for one in self._examples.values()]
        for trigger in (self._actions.start.click, self.subject.prompt.submit, *clicked):
            self.generate_on(trigger)
        random = self._actions.others[0].click
        self._show_link(random(self._generate_with_random_seed, self._inputs, self.outputs, **GENERATES))
        self._show_link(self._history.click(self._reopen, None, self.outputs, **GENERATES))
        self._show_link(self._picture_in.upload(self._open_picture, self._picture_in, self.outputs, **GENERATES))
        self._again.click(self._generate_again, self.last, finished, **GENERATES)
        self._film.click(self._generate_film, self.last, shown, **GENERATES)
        self._copy.click(None, self._link, self._copy, js=COPY_LINK, **AT_ONCE)
        given = [self.subject.model, self.subject.class_label]
        self.subject.model.input(self._form_of, given, fields, **AT_ONCE)

    def generate_on(self, trigger: Callable) -> None:
        """Generate what the form says on a Gradio event.

        Args:
            trigger: registers a listener, as `button.click` does.
        """
        self._show_link(trigger(self._generate_form, self._inputs, self.outputs, **GENERATES))

    def _show_link(self, run: Dependency) -> None:
        """After a run, the page's address is the link to the image."""
        run.success(None, [self._link, self._picture], js=SHOW_LINK, **AT_ONCE)

    def open_page(self, page: gr.Request) -> Iterator[dict]:
        """Generate the image of the link that opened the page, or else the first example."""
        yield from self._open(page, page.query_params)

    def _reopen(self, page: gr.Request, event: gr.EventData) -> Iterator[dict]:
        link = getattr(event, "link", None)
        if not isinstance(link, str):
            raise refusal("no picture was clicked: click one")
        yield from self._open(page, dict(parse_qsl(link.removeprefix("?"))))

    def _open_picture(self, page: gr.Request, path: str | None) -> Iterator[dict]:
        if path is None:
            raise refusal("no picture was dropped: drop one")
        query, lacks = query_of_picture(Path(path), self._engine)
        yield from self._open(page, query, "the picture", lacks)

    def _open(
        self, page: gr.Request, query: Mapping[str, str], what: str = "the link", lacks: Sequence[str] = ()
    ) -> Iterator[dict]:
        """Fill the form from a query, and generate what it says unless it `lacks` something."""
        engine = self._engine
        request = from_query(query, engine, what)
        if request is None:
            if self._first_result is not None:
                yield self._finished(self._first, self._first_result)
                return
            request = self._first
        else:
            request = replace(request, preview_every=preview_every(engine, request.model))
            label = None if request.class_label is None else str(request.class_label)
            yield {self.subject.model: request.model, **self._form_of(request.model, label, request)}
            if REFERENCES in query:
                lacks = [*lacks, markup.ADD_REFERENCES]
            if lacks:
                yield {self._status: markup.lacking(lacks), self._link: ""}
                return
        yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, request))

    def _generate(self, submit: Callable[[Request], Ticket], request: Request) -> Iterator[dict]:
        for event in events(submit, request):
            if isinstance(event, Progress):
                yield self._progress(request, event)
            else:
                if request is self._first:
                    self._first_result = event
                yield self._finished(request, event)

    def _progress(self, request: Request, now: Progress) -> dict:
        update = {self._status: markup.progress(now, request.count), **self._actions.busy()}
        if now.previews:
            update[self._gallery] = gr.Gallery([*map(saved, now.previews)], columns=_columns(request))
        return update

    def _finished(self, request: Request, result: Result) -> dict:
        images = result.images
        path = write_download(images, _name(request), self._gallery.GRADIO_CACHE)
        return {
            self._gallery: gr.Gallery([*map(saved, images)], columns=_columns(request)),
            self._status: markup.finished(result),
            self._download: gr.DownloadButton("Download", value=path, interactive=True),
            self._again: gr.Button(interactive=True),
            self._film: gr.Button(interactive=True),
            self._copy: gr.Button("Copy link", interactive=True),
            self._link: to_query(request, result, self._engine),
            self._picture: thumbnail(images[0]),
            self.last: (request, images[0]),
            **self._actions.idle(),
        }

    def _generate_form(self, page: gr.Request, *given) -> Iterator[dict]:
        yield from self._generate_values(page, dict(zip(self._inputs, given, strict=True)))

    def _generate_with_random_seed(self, page: gr.Request, *given) -> Iterator[dict]:
        seed = self._settings.seed
        values = dict(zip(self._inputs, given, strict=True)) | {seed: random_seed()}
        for update in self._generate_values(page, values):
            yield {seed: values[seed], **update}

    def _generate_values(self, page: gr.Request, values: dict) -> Iterator[dict]:
        model, prompt, class_label = (values[control] for control in self.subject.inputs)
        request = Request(
            **self.subject.condition(model, prompt, class_label),
            **self._settings.fields(model, values),
            preview_every=preview_every(self._engine, model),
        )
        # The page keeps its last request, but no photos.
        request = reduce_uploads(request, self._engine.models[model])
        yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, request))

    def _generate_again(self, page: gr.Request, last: tuple[Request, Image.Image] | None) -> Iterator[dict]:
        request = last_of(last)[0]
        yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, request))

    def _generate_film(self, page: gr.Request, last: tuple[Request, Image.Image] | None) -> Iterator[dict]:
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

    def _form_of(self, model: str, class_label: str | None, request: Request | None = None) -> dict:
        """Updates that show the form of a model, filled with its defaults or a request."""
        info = self._engine.models[model]
        examples = {one.dataset: gr.Dataset(visible=tries(info, its)) for its, one in self._examples.items()}
        return {
            **self.subject.show(model, class_label, None if request is None else request.prompt),
            **examples,
            **self._settings.show(model, request),
        }


def last_of(last: tuple[Request, Image.Image] | None) -> tuple[Request, Image.Image]:
    """The request and the first image of the last run of a page.

    Raises:
        gr.Error: if there was none, or the page is so old that its run is forgotten.
    """
    if last is None:
        raise refusal("no image has been generated yet: generate one in the tab Generate")
    return last


def _columns(request: Request) -> int:
    return 1 if request.count == 1 else 2 if request.count <= 4 else 4


def _name(request: Request) -> str:
    return f"{request.prompt or f'class {request.class_label}'} {request.seed}"
