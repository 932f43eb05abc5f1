"""The tab that generates one prompt with several decodings in turn, then shows them side by side as a film."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import gradio as gr

from ...media.film import write_race
from ..engine.engine import Engine
from ..engine.ticket import Ticket
from ..engine.types import Progress, Request, Result
from . import markup
from .controls import AT_ONCE, GENERATES, GenerateAndStop, Subject, chosen, decoding_choices, events, refusal


# Decodings side by side.
SLOTS = 4
# On a narrow screen the race is below the controls: scroll to it once its cards exist.
SHOW_RACE = """() => innerWidth <= 680 && setTimeout(
    () => document.getElementById("race-status").scrollIntoView({block: "start"}), 1000
)"""
SHOW_FILM = "() => innerWidth <= 680 && document.getElementById('film').scrollIntoView({block: 'start'})"
# Forward passes that complete the one-time setup of a decoding.
WARM = 3


class Comparison:
    """Generates one request with several decodings, one after another. A few forward passes run before the first use
    of each, so that no measured run includes one-time setup."""

    def __init__(self):
        self._warm = set()

    def run(
        self, submit: Callable[[Request], Ticket], request: dict, decodings: Sequence[str | None]
    ) -> Iterator[tuple[int, Progress | Result]]:
        """Yield (index of the decoding, progress or result).

        Args:
            submit: `Engine.submit`.
            request: the fields of the `Request` except the decoding.

        Raises:
            gr.Error: if there are too few or too many decodings, or the engine refuses one.
        """
        if not 2 <= len(decodings) <= SLOTS:
            raise refusal(f"the number of decodings is {len(decodings)}: choose 2 to {SLOTS}")
        for number, decoding in enumerate(decodings):
            one = Request(**request, decoding=decoding)
            if (one.model, decoding) not in self._warm:
                with closing(events(submit, one)) as warming:
                    next(event for event in warming if isinstance(event, Result) or event.passes >= WARM)
                self._warm.add((one.model, decoding))
            for event in events(submit, one):
                yield number, event


def some_decodings(engine: Engine, model: str) -> list[str]:
    """The initial choice: one token per forward pass and the model's default; if these are the same, the default and
    the next decoding."""
    values = [value for _, value in decoding_choices(engine, model)]
    default = engine.models[model].decoding
    return list(dict.fromkeys(["ar" if "ar" in values else default, default, *values]))[:2]


def race_tab(engine: Engine, comparison: Comparison) -> None:
    """Build the tab."""
    first = next(iter(engine.models))
    with gr.Row():
        subject = Subject(engine)
        seed = gr.Number(0, label="Seed", precision=0, min_width=100)
    with gr.Row():
        decodings = gr.Dropdown(
            decoding_choices(engine, first),
            value=some_decodings(engine, first),
            label="Decodings",
            multiselect=True,
            max_choices=SLOTS,
            scale=4,
            min_width=300,
            elem_id="decodings",
        )
        with gr.Column(min_width=160, elem_classes="at-end"):
            actions = GenerateAndStop(engine, "Race", "race")
    status = gr.HTML(markup.RACE, elem_id="race-status")
    film = gr.Image(visible=False, show_label=False, buttons=[], elem_id="film")
    download = gr.DownloadButton("Download the race", size="sm", visible=False, elem_id="download-race")
    with gr.Row(elem_classes="cards"):
        cards = [gr.HTML(visible=False, min_width=220, elem_id=f"card-{i}") for i in range(SLOTS)]
    legend = gr.HTML(markup.LEGEND, visible=False)

    def generate(submit, model, prompt, class_label, decodings, seed) -> Iterator[dict]:
        info = engine.models[model]
        update = dict.fromkeys([*cards, legend], gr.HTML(visible=False)) | actions.busy()
        update |= {status: markup.RACE, film: gr.Image(visible=False), download: gr.DownloadButton(visible=False)}
        for card, decoding in zip(cards, decodings, strict=False):
            update[card] = gr.HTML(markup.card(decoding, info, None), visible=True)
        request = subject.condition(model, prompt, class_label) | {"seed": seed, "film": True}
        began, results, shown = {}, [], {}
        for number, event in comparison.run(submit, request, [chosen(info, decoding) for decoding in decodings]):
            if isinstance(event, Result):
                results.append(event)
            elif event.passes:
                began.setdefault(number, time.monotonic())
            seconds = time.monotonic() - began.get(number, time.monotonic())
            shown[cards[number]] = gr.HTML(markup.card(decodings[number], info, event, seconds), visible=True)
            yield update | {cards[number]: shown[cards[number]]}
            update = {}
        path = write_race(
            [result.film for result in results], f"race {prompt or class_label} {seed}", film.GRADIO_CACHE
        )
        # A busy page may drop updates that another follows at once, so the results are sent again with the last one.
        yield shown | {
            film: gr.Image(path, visible=True),
            download: gr.DownloadButton(value=path, visible=True),
            legend: gr.HTML(visible=True),
            status: "",
            **actions.idle(),
        }

    def race_form(page: gr.Request, *values) -> Iterator[dict]:
        yield from actions.run(page, status, lambda submit: generate(submit, *values))

    # Before the race itself, because the page runs them in this order.
    actions.start.click(None, js=SHOW_RACE, **AT_ONCE)
    race = gr.on(
        [actions.start.click, subject.prompt.submit],
        race_form,
        [*subject.inputs, decodings, seed],
        [*cards, legend, film, download, status, *actions.buttons],
        **GENERATES,
    )
    race.success(None, js=SHOW_FILM, **AT_ONCE)

    def on_model(model: str) -> dict:
        choices = gr.Dropdown(decoding_choices(engine, model), value=some_decodings(engine, model))
        return subject.show(model) | {decodings: choices}

    subject.model.input(on_model, subject.model, [*subject.inputs[1:], decodings], **AT_ONCE)
