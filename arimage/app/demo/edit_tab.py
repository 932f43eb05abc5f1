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


def edit_tab(engine: Engine, last: gr.State) -> Subject:
    """Build the tab and return its model and prompt; `last` is that of `GenerateTab`."""
    info = next(iter(engine.models.values()))
    with gr.Row():
        subject = Subject(engine)
        decoding = DecodingChoice(engine, subject)
        seed = seed_input()
    decoding.about.render()
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
            hint = gr.HTML(markup.about_editing(info))
            with gr.Row():
                actions = GenerateAndStop(engine, "Generate", "edit")
            with gr.Row():
                shown = {
                    "format": "png",
                    "interactive": False,
                    "height": 260,
                    "elem_classes": "pixels",
                    "min_width": 140,
                }
                before = gr.Image(label="Before", buttons=[], elem_id="before", **shown)
                after = gr.Image(label="After", buttons=["download"], elem_id="after", **shown)
            status = gr.HTML(markup.EMPTY, elem_id="edit-status")

    def generate(submit, drawing, model, prompt, class_label, decoding, seed, part, *sides) -> Iterator[dict]:
        check_drawing(drawing)
        height, width = engine.models[model].sizes[0]
        box = sides if part == RECTANGLE else HALVES.get(part)
        if box is not None and (None in box or box[0] >= box[2] or box[1] >= box[3]):
            raise refusal("the rectangle is empty: choose Left below Right, and Top below Bottom")
        image, mask = image_and_mask(drawing, (width, height), box)
        if mask.getextrema()[1] < 128:  # pyright: ignore[reportOperatorIssue] a mask has one band
            raise refusal(
                "nothing is painted over: paint over the part that you want to change, or choose another Part"
            )
        request = Request(
            **subject.condition(model, prompt, class_label),
            decoding=chosen(engine.models[model], decoding),
            seed=seed,
            image=image,
            mask_image=mask,
            preview_every=preview_every(engine, model),
        )
        first = {before: saved(image), after: None}
        for event in events(submit, request):
            if isinstance(event, Progress):
                partial = {after: saved(event.previews[0])} if event.previews else {}
                yield {**first, **partial, status: markup.progress(event, 1), **actions.busy()}
                first = {}
            else:
                yield {after: saved(event.images[0]), status: markup.finished(event), **actions.idle()}

    def edit_form(page: gr.Request, *values) -> Iterator[dict]:
        yield from actions.run(page, status, lambda submit: generate(submit, *values))

    gr.on(
        [actions.start.click, subject.prompt.submit],
        edit_form,
        [editor, *subject.inputs, decoding.dropdown, seed, part, *sides],
        [before, after, status, *actions.buttons],
        **GENERATES,
    )

    def take_last(last):
        return for_editor(last_of(last)[1])

    def take_upload(drawing, model):
        check_drawing(drawing)
        height, width = engine.models[model].sizes[0]
        # Cropped as the model will see it.
        shown = for_editor(ImageOps.fit(to_rgb("the image", drawing["background"]), (width, height)))
        # The image that this returns triggers another upload event.
        return gr.skip() if shown.size == drawing["background"].size else shown

    part.change(lambda part: gr.Row(visible=part == RECTANGLE), part, rectangle, **AT_ONCE)
    take.click(take_last, last, editor, **AT_ONCE)
    editor.upload(take_upload, [editor, subject.model], editor, **AT_ONCE)

    def on_model(model: str, class_label: str | None) -> dict:
        about = {hint: markup.about_editing(engine.models[model])}
        return subject.show(model, class_label) | decoding.choices(model) | about

    shown = [*subject.inputs[1:], decoding.dropdown, decoding.about, hint]
    subject.model.input(on_model, [subject.model, subject.class_label], shown, **AT_ONCE)
    return subject


def check_drawing(drawing: dict | None) -> None:
    """Refuse an `ImageEditor` without an image.

    Raises:
        gr.Error: if there is none.
    """
    if drawing is None or drawing["background"] is None:
        raise refusal("the editor holds no image: upload one, or take the last one from Generate")
