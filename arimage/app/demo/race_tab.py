"""The tab that generates one prompt in several ways in turn, then shows them side by side as a film."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

import gradio as gr

from ...media.film import write_race
from ..engine.engine import Engine
from ..engine.ticket import Ticket
from ..engine.types import Progress, Request, Result
from . import markup
from .controls import (
    AT_ONCE,
    GENERATES,
    GenerateAndStop,
    Subject,
    chosen,
    decoding_choices,
    events,
    refusal,
    seed_input,
)


# Runs side by side.
SLOTS = 4
# On a narrow screen the race is below the controls: scroll to it once its cards exist.
SHOW_RACE = """() => innerWidth <= 680 && setTimeout(
    () => document.getElementById("race-status").scrollIntoView({block: "start"}), 1000
)"""
SHOW_FILM = "() => innerWidth <= 680 && document.getElementById('film').scrollIntoView({block: 'start'})"
IS_NARROW = "(...values) => [...values.slice(0, -1), innerWidth <= 680 ? 1 : 0]"
# Forward passes that complete the one-time setup of a decoding.
WARM = 3


class Comparison:
    """Generates one request in several ways, one after another. A few forward passes run before the first use of
    each, or whole images where steps are captured, so that no measured run includes one-time setup."""

    def __init__(self, engine: Engine):
        self._engine, self._warm = engine, set()

    def run(
        self, submit: Callable[[Request], Ticket], request: dict, runs: Sequence[tuple[str, str | None]]
    ) -> Iterator[tuple[int, Progress | Result]]:
        """Yield (index of the run, progress or result).

        Args:
            submit: `Engine.submit`.
            request: the other fields of the `Request`.
            runs: models and their decodings.

        Raises:
            gr.Error: if there are too few or too many runs, or the engine refuses one.
        """
        if not 2 <= len(runs) <= SLOTS:
            raise refusal(f"the number of decodings is {len(runs)}: choose 2 to {SLOTS}")
        for number, (model, decoding) in enumerate(runs):
            one = Request(**request | {"model": model, "decoding": decoding})
            if (one.model, decoding) not in self._warm:
                most = math.inf if self._engine.captures(one.model) else WARM
                for _ in self._engine.until_captured(one.model):
                    with closing(events(submit, one)) as warming:
                        next(event for event in warming if isinstance(event, Result) or event.passes >= most)
                self._warm.add((one.model, decoding))
            for event in events(submit, one):
                yield number, event


def run_choices(engine: Engine, model: str) -> list[tuple[str, str]]:
    """Labels and values of what can race: the decodings of a model, and the others that take the same prompts or
    classes, each with its default."""
    choices = decoding_choices(engine, model)
    for name, info in engine.models.items():
        if name != model and info.classes == engine.models[model].classes:
            label = next(label for label, value in decoding_choices(engine, name) if value == info.decoding)
            choices.append((f"{name} · {label}", f"{name} {info.decoding}"))
    return choices


def some_runs(engine: Engine, model: str) -> list[str]:
    """The initial choice: one token per forward pass and the model's default, or if these are the same, the default
    and what comes next; then a student that generates all tokens at once, if there is one."""
    values = [value for _, value in run_choices(engine, model)]
    default = engine.models[model].decoding
    chosen = list(dict.fromkeys(["ar" if "ar" in values else default, default, *values]))[:2]
    names = {value: parse_run(engine, model, value)[1].partition(":")[0] for value in values}
    return chosen + [value for value in values if names[value] == "few-step" and value not in chosen][:1]


def parse_run(engine: Engine, model: str, value: str) -> tuple[str, str]:
    """The model and the decoding of a value of `run_choices`."""
    # Names of models may have spaces, decodings do not.
    other, _, decoding = value.rpartition(" ")
    return (other, decoding) if other in engine.models else (model, value)


class RaceTab:
    """The tab.

    Attributes:
        subject: its model and its prompt or class.
    """

    def __init__(self, engine: Engine, comparison: Comparison):
        self._engine, self._comparison = engine, comparison
        first = next(iter(engine.models))
        with gr.Row():
            self.subject = Subject(engine)
            seed = seed_input("The same for all of them.")
        with gr.Row():
            self._decodings = gr.Dropdown(
                run_choices(engine, first),
                value=some_runs(engine, first),
                label="Decodings",
                info=f"2 to {SLOTS} ways to generate the image.",
                multiselect=True,
                max_choices=SLOTS,
                scale=4,
                min_width=300,
                elem_id="decodings",
            )
            with gr.Column(min_width=160, elem_classes="at-end"):
                self._actions = GenerateAndStop(engine, "Race", "race")
        self._status = gr.HTML(markup.RACE, elem_id="race-status")
        self._film = gr.Image(visible=False, show_label=False, buttons=[], elem_id="film")
        self._download = gr.DownloadButton("Download the race", size="sm", visible=False, elem_id="download-race")
        with gr.Row(elem_classes="cards"):
            self._cards = [gr.HTML(visible=False, min_width=220, elem_id=f"card-{i}") for i in range(SLOTS)]
        self._legend = gr.HTML(markup.LEGEND, visible=False)
        narrow = gr.Number(0, label="Narrow", precision=0, visible=False)

        # Before the race itself, because the page runs them in this order.
        self._actions.start.click(None, js=SHOW_RACE, **AT_ONCE)
        model, *conditions = self.subject.inputs
        race = gr.on(
            [self._actions.start.click, self.subject.prompt.submit],
            self._race,
            [model, *conditions, self._decodings, seed, narrow],
            [*self._cards, self._legend, self._film, self._download, self._status, *self._actions.buttons],
            js=IS_NARROW,
            **GENERATES,
        )
        race.success(None, js=SHOW_FILM, **AT_ONCE)
        shown = [*conditions, self._decodings]
        model.input(self._form_of, [model, self.subject.class_label], shown, **AT_ONCE)

    def _form_of(self, model: str, class_label: str | None) -> dict:
        choices = gr.Dropdown(run_choices(self._engine, model), value=some_runs(self._engine, model))
        return self.subject.show(model, class_label) | {self._decodings: choices}

    def _race(self, page: gr.Request, *values) -> Iterator[dict]:
        yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, *values))

    def _generate(self, submit, model, prompt, class_label, decodings, seed, narrow) -> Iterator[dict]:
        engine, cards = self._engine, self._cards
        runs = [parse_run(engine, model, value) for value in decodings]
        update = dict.fromkeys([*cards, self._legend], gr.HTML(visible=False)) | self._actions.busy()
        hidden = {self._film: gr.Image(visible=False), self._download: gr.DownloadButton(visible=False)}
        update |= {self._status: markup.RACE, **hidden}
        # The engine refuses what a model cannot run.
        exact = [engine.models[name].decodings.get(decoding.partition(":")[0], False) for name, decoding in runs]
        for card, label, flag in zip(cards, decodings, exact, strict=False):
            update[card] = gr.HTML(markup.card(label, flag, None), visible=True)
        request = self.subject.condition(model, prompt, class_label) | {"seed": seed, "film": True}
        asked = [(name, chosen(engine.models[name], decoding)) for name, decoding in runs]
        began, results, shown = {}, [], {}
        for number, event in self._comparison.run(submit, request, asked):
            if isinstance(event, Result):
                results.append(event)
            elif event.passes:
                began.setdefault(number, time.monotonic())
            seconds = time.monotonic() - began.get(number, time.monotonic())
            card = markup.card(decodings[number], exact[number], event, seconds)
            shown[cards[number]] = gr.HTML(card, visible=True)
            yield update | {cards[number]: shown[cards[number]]}
            update = {}
        films, name = [result.film for result in results], f"race {prompt or class_label} {seed}"
        path = write_race(films, name, self._film.GRADIO_CACHE, 2 if narrow else SLOTS)
        # A busy page may drop updates that another follows at once, so the results are sent again with the last one.
        yield shown | {
            self._film: gr.Image(path, visible=True),
            self._download: gr.DownloadButton(value=path, visible=True),
            self._legend: gr.HTML(visible=True),
            self._status: "",
            **self._actions.idle(),
        }
