"""The controls that the tabs share, and the code that runs their requests."""

import html
import math
import random
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

import gradio as gr

from ..engine.engine import Engine
from ..engine.models import ModelInfo
from ..engine.ticket import Ticket
from ..engine.types import Cancelled, Progress, Refused, Request, Result
from ..engine.videos import VideoMaker
from . import markup


# Seconds between two progress reports of a run, partial images aside.
PAUSE = 0.1
# Settings of the page's events: those that generate, and those that take no time and skip the queue.
GENERATES = {"show_progress": "hidden"}
AT_ONCE = {**GENERATES, "queue": False}


def refusal(message: str) -> gr.Error:
    """The error for a refused request, on the page and for clients."""
    # The page renders messages as HTML.
    return gr.Error(html.escape(message, quote=False), print_exception=False)


def events(submit: Callable[[Request], Ticket], request: Request) -> Generator[Progress | Result, None, None]:
    """Progress and result of a request; `submit` is `Engine.submit`.

    Leaving the loop early, for example because the page was closed, cancels the request.

    Raises:
        gr.Error: if the engine refuses the request.
        Cancelled: if the request is cancelled.
    """
    ticket = None
    try:
        ticket = submit(request)
        reported = -math.inf
        # Gradio notices a closed page only when it sends something.
        for event in ticket.events(every=1):
            now = time.monotonic()
            if isinstance(event, Result) or event.previews or now - reported > PAUSE:
                reported = now
                yield event
    except Refused as error:
        raise refusal(str(error)) from error
    finally:
        if ticket is not None:
            ticket.cancel()


def client_of(page: gr.Request) -> str:
    """Who asks: a page, a program with Gradio's client, or the address of one that has no session."""
    # Gradio gives each call without a session one of its own, 32 digits.
    session = page.session_hash or ""
    address = page.client.host if page.client else ""
    return address if re.fullmatch(r"[0-9a-f]{32}|", session) else session


def random_seed() -> int:
    """A random seed, short enough to type."""
    return random.randrange(10**6)


def class_choices(info: ModelInfo) -> list[tuple[str, str]]:
    """Labels and values of the classes of a model: names with ids, or ids alone."""
    if info.class_names is not None:
        return [(f"{name} · {i}", str(i)) for i, name in enumerate(info.class_names)]
    return [(str(i), str(i)) for i in range(info.classes or 0)]


def decoding_choices(engine: Engine | VideoMaker, model: str) -> list[tuple[str, str]]:
    """Labels and values of the decodings of a model, exact ones first; the default has its settings."""
    info = engine.models[model]
    default = info.decoding.partition(":")[0]
    choices = []
    for name in sorted(info.decodings, key=lambda name: not info.decodings[name]):
        text = info.decoding if name == default else name
        choices.append((f"{text} · {'exact' if info.decodings[name] else 'lossy'}", text))
    return choices


def chosen(info: ModelInfo, decoding: str) -> str | None:
    """The `Request.decoding` of a choice: None for the default, whose settings a request may not be allowed to set."""
    return None if decoding == info.decoding else decoding


def model_input(engine: Engine | VideoMaker, info: str) -> gr.Dropdown:
    models = list(engine.models)
    return gr.Dropdown(
        models, value=models[0], label="Model", info=info, filterable=False, visible=len(models) > 1, min_width=180
    )


def seed_input(info: str = "Same seed, same image.") -> gr.Number:
    return gr.Number(0, label="Seed", info=info, precision=0, min_width=100)


class Subject:
    """The controls for the model and its prompt or class."""

    def __init__(self, engine: Engine):
        self._engine = engine
        first, info = next(iter(engine.models.items()))
        self.prompt = gr.Textbox(
            info.examples[0],
            label="Prompt",
            info="What the image shows.",
            visible=info.classes is None,
            max_lines=1,
            elem_classes=self._list_of(first),
            scale=2,
            min_width=200,
        )
        self.class_label = gr.Dropdown(
            class_choices(info),
            value=None if info.classes is None else "0",
            label="Class",
            info="What the image shows; type to search.",
            visible=info.classes is not None,
            scale=2,
            min_width=200,
        )
        self.model = model_input(engine, "Makes the image.")

    @property
    def inputs(self) -> list[gr.components.Component]:
        return [self.model, self.prompt, self.class_label]

    def condition(self, model: str, prompt: str, class_label: str | None) -> dict:
        """The arguments of a `Request` for the model and its prompt or class."""
        if self._engine.models[model].classes is None:
            return {"model": model, "prompt": prompt}
        return {"model": model, "class_label": None if class_label is None else int(class_label)}

    def show(self, model: str, class_label: str | None, prompt: str | None = None) -> dict:
        """Show the prompt or the classes, whichever the model takes, with these values if it has them."""
        info = self._engine.models[model]
        choices = class_choices(info)
        chosen = None if info.classes is None else "0"
        if class_label in [value for _, value in choices]:
            chosen = class_label
        text = {} if prompt is None else {"value": prompt}
        return {
            self.prompt: gr.Textbox(**text, visible=info.classes is None, elem_classes=self._list_of(model)),
            self.class_label: gr.Dropdown(choices, value=chosen, visible=info.classes is not None),
        }

    def _list_of(self, model: str) -> list[str]:
        """The CSS class that names the list of `markup.suggestions` for the prompts of a model."""
        return [f"suggests-{list(self._engine.models).index(model)}"]


class DecodingChoice:
    """The dropdown of decodings, and a line about the selected one, which the tab places."""

    def __init__(self, engine: Engine, subject: Subject):
        self._engine = engine
        first, info = next(iter(engine.models.items()))
        self.dropdown = gr.Dropdown(
            decoding_choices(engine, first),
            value=info.decoding,
            label="Decoding",
            info="How the tokens of the image are decided.",
            filterable=False,
            min_width=310,
        )
        self.about = gr.HTML(markup.about_decoding(info, info.decoding), render=False)
        self.dropdown.change(self._about, [subject.model, self.dropdown], self.about, **AT_ONCE)

    def choices(self, model: str, decoding: str | None = None) -> dict:
        """Offer the decodings of a model and select one, with any settings, or else the default."""
        info = self._engine.models[model]
        choices = decoding_choices(self._engine, model)
        if decoding is None or decoding.partition(":")[0] not in info.decodings:
            decoding = info.decoding
        if decoding not in dict(choices).values():
            choices.append((decoding, decoding))
        return {self.dropdown: gr.Dropdown(choices, value=decoding), self.about: self._about(model, decoding)}

    def _about(self, model: str, decoding: str) -> str:
        return markup.about_decoding(self._engine.models[model], decoding)


class GenerateAndStop:
    """A button that starts a run, with others next to it. During the run, a stop button replaces them."""

    def __init__(self, engine: Engine, label: str, name: str, others: tuple[str, ...] = ()):
        self._engine, self._running = engine, {}
        self.start = gr.Button(label, variant="primary", elem_id=name, min_width=120)
        self.others = [gr.Button(other, min_width=120, elem_id=other.lower().replace(" ", "-")) for other in others]
        self.stop = gr.Button("Stop", variant="stop", visible=False, elem_id=f"stop-{name}", min_width=120)
        self.stop.click(self._stop, None, None, **AT_ONCE)

    @property
    def buttons(self) -> list[gr.Button]:
        return [self.start, *self.others, self.stop]

    def busy(self) -> dict:
        return {self.stop: gr.Button(visible=True)} | {each: gr.Button(visible=False) for each in self.buttons[:-1]}

    def idle(self) -> dict:
        return {self.stop: gr.Button(visible=False)} | {each: gr.Button(visible=True) for each in self.buttons[:-1]}

    def run(
        self, page: gr.Request, status: gr.HTML, generate: Callable[[Callable[[Request], Ticket]], Iterator[dict]]
    ) -> Iterator[dict]:
        """The updates of `generate`. After a stop or an error the buttons are as before.

        Args:
            generate: submits its requests with the function that it gets, so that the stop button finds them.

        Raises:
            gr.Error: if this page already has a run.
        """
        session = page.session_hash
        if session in self._running:
            raise refusal("this page is generating an image already: wait for it, or stop it")

        def submit(request: Request) -> Ticket:
            self._running[session] = self._engine.submit(replace(request, client=client_of(page)))
            return self._running[session]

        self._running[session] = None
        try:
            yield from generate(submit)
        except Cancelled:
            yield {status: markup.STOPPED, **self.idle()}
        except Exception:
            yield {status: "", **self.idle()}
            raise
        finally:
            del self._running[session]

    def _stop(self, page: gr.Request) -> None:
        ticket = self._running.get(page.session_hash)
        if ticket is not None:
            ticket.cancel()
