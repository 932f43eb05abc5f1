"""The tab that generates part of an image again."""

from collections.abc import Iterator

import gradio as gr
from PIL import ImageOps

from ...media.files import to_rgb
from ..engine.engine import Engine
from ..engine.types import Progress, Request
from . import markup
from .controls import (
    AT_ONCE,
    GENERATES,
    DecodingChoice,
    GenerateAndStop,
    Subject,
    chosen,
    events,
    refusal,
    seed_input,
)
from .generate_tab import last_of, preview_every
from .pictures import for_editor, image_and_mask, saved


PAINTED, RECTANGLE = "what I paint", "a rectangle"
# Left, top, right and bottom in percent.
HALVES = {
    "the upper half": (0, 0, 100, 50),
    "the lower half": (0, 50, 100, 100),
    "the left half": (0, 0, 50, 100),
    "the right half": (50, 0, 100, 100),
}


class EditTab:
    """The tab.

    Args:
        last: that of `GenerateTab`.

    Attributes:
        subject: its model and its prompt or class.
    """

    def __init__(self, engine: Engine, last: gr.State):
        self._engine = engine
        info = next(iter(engine.models.values()))
        with gr.Row():
            self.subject = Subject(engine)
            self._decoding = DecodingChoice(engine, self.subject)
            seed = seed_input()
        self._decoding.about.render()
        with gr.Row(equal_height=False):
            with gr.Column(scale=5, min_width=300):
                editor = gr.ImageEditor(
                    label="Paint over a part",
                    placeholder="Drop an image here,\nor take the last one",
                    type="pil",
                    format="png",
                    sources=["upload", "clipboard"],
                    brush=gr.Brush(default_size=64, colors=["#ff3d7f"], color_mode="fixed"),
                    layers=False,
                    transforms=[],
                    height=480,
                    canvas_size=(512, 512),
                    buttons=[],
                    elem_id="editor",
                )
                part = gr.Dropdown(
                    [PAINTED, *HALVES, RECTANGLE],
                    value=PAINTED,
                    label="Part",
                    info="What is generated again.",
                    filterable=False,
                    elem_id="part",
                )
                with gr.Row(visible=False) as rectangle:
                    sides = [
                        gr.Number(value, label=label, info="in percent", minimum=0, maximum=100, min_width=80)
                        for label, value in (("Left", 25), ("Top", 25), ("Right", 75), ("Bottom", 75))
                    ]
                take = gr.Button("Take the last image from Generate", size="sm", elem_id="take")
            with gr.Column(scale=5, min_width=300):
                self._hint = gr.HTML(markup.about_editing(info))
                with gr.Row():
                    self._actions = GenerateAndStop(engine, "Generate", "edit")
                with gr.Row():
                    look = {
                        "format": "png",
                        "interactive": False,
                        "height": 260,
                        "elem_classes": "pixels",
                        "min_width": 140,
                    }
                    self._before = gr.Image(label="Before", buttons=[], elem_id="before", **look)
                    self._after = gr.Image(label="After", buttons=["download"], elem_id="after", **look)
                self._status = gr.HTML(markup.EMPTY, elem_id="edit-status")

        model, *conditions = self.subject.inputs
        gr.on(
            [self._actions.start.click, self.subject.prompt.submit],
            self._edit,
            [editor, model, *conditions, self._decoding.dropdown, seed, part, *sides],
            [self._before, self._after, self._status, *self._actions.buttons],
            **GENERATES,
        )
        part.change(lambda part: gr.Row(visible=part == RECTANGLE), part, rectangle, **AT_ONCE)
        take.click(lambda last: for_editor(last_of(last)[1]), last, editor, **AT_ONCE)
        editor.upload(self._cropped, [editor, model], editor, **AT_ONCE)
        shown = [*conditions, self._decoding.dropdown, self._decoding.about, self._hint]
        model.input(self._form_of, [model, self.subject.class_label], shown, **AT_ONCE)

    def _form_of(self, model: str, class_label: str | None) -> dict:
        about = {self._hint: markup.about_editing(self._engine.models[model])}
        return self.subject.show(model, class_label) | self._decoding.choices(model) | about

    def _cropped(self, drawing, model: str):
        """An upload as the model will see it."""
        check_drawing(drawing)
        height, width = self._engine.models[model].sizes[0]
        shown = for_editor(ImageOps.fit(to_rgb("the image", drawing["background"]), (width, height)))
        # The image that this returns triggers another upload event.
        return gr.skip() if shown.size == drawing["background"].size else shown

    def _edit(self, page: gr.Request, *values) -> Iterator[dict]:
        yield from self._actions.run(page, self._status, lambda submit: self._generate(submit, *values))

    def _generate(self, submit, drawing, model, prompt, class_label, decoding, seed, part, *sides) -> Iterator[dict]:
        check_drawing(drawing)
        height, width = self._engine.models[model].sizes[0]
        box = sides if part == RECTANGLE else HALVES.get(part)
        if box is not None and (None in box or box[0] >= box[2] or box[1] >= box[3]):
            raise refusal("the rectangle is empty: choose Left below Right, and Top below Bottom")
        image, mask = image_and_mask(drawing, (width, height), box)
        if mask.getextrema()[1] < 128:  # pyright: ignore[reportOperatorIssue] a mask has one band
            raise refusal(
                "nothing is painted over: paint over the part that you want to change, or choose another Part"
            )
        request = Request(
            **self.subject.condition(model, prompt, class_label),
            decoding=chosen(self._engine.models[model], decoding),
            seed=seed,
            image=image,
            mask_image=mask,
            preview_every=preview_every(self._engine, model),
        )
        first = {self._before: saved(image), self._after: None}
        for event in events(submit, request):
            if isinstance(event, Progress):
                partial = {self._after: saved(event.previews[0])} if event.previews else {}
                yield {**first, **partial, self._status: markup.progress(event, 1), **self._actions.busy()}
                first = {}
            else:
                done = {self._after: saved(event.images[0]), self._status: markup.finished(event)}
                yield {**done, **self._actions.idle()}


def check_drawing(drawing: dict | None) -> None:
    """Refuse an `ImageEditor` without an image.

    Raises:
        gr.Error: if there is none.
    """
    if drawing is None or drawing["background"] is None:
        raise refusal("the editor holds no image: upload one, or take the last one from Generate")
