"""The settings of the Generate tab: all that a request holds next to its model and its prompt or class."""

from fractions import Fraction
from typing import Any, get_args

import gradio as gr

from ...decoding import Order
from ..engine.engine import Engine
from ..engine.models import ModelInfo
from ..engine.types import Request
from .controls import DecodingChoice, Subject, chosen, seed_input


# The size of a model that reads references: that of its own, or the one most like the last reference.
AUTOMATIC = "automatic"
# Numbers that models have a default for: label, help, step and digits.
NUMBERS: dict[str, tuple[str, str, float, int | None]] = {
    "guidance_scale": ("Guidance", "How strongly images follow the prompt or class; 1 is off.", 0.1, None),
    "temperature": ("Temperature", "Above 0: lower is safer, higher is more varied.", 0.1, None),
    "top_k": ("Top-k", "Samples from this many most likely tokens; 0 is off.", 1, 0),
    "top_p": ("Top-p", "Samples from the most likely tokens of this total probability; 1 is off.", 0.05, None),
    "min_p": ("Min-p", "Drops tokens below this share of the most likely one; 0 is off.", 0.01, None),
    "num_inference_steps": ("Decoder steps", "Denoising steps from tokens to pixels; more take longer.", 1, 0),
    "decoder_guidance_scale": ("Decoder guidance", "Guidance of the steps from tokens to pixels.", 0.1, None),
}


class Settings:
    """The controls, and what they say about a request.

    Attributes:
        seed: the control of the seed.
        inputs: all controls.
        outputs: what a change of the model changes.
    """

    def __init__(self, engine: Engine, subject: Subject):
        self._engine = engine
        shown = _shown(next(iter(engine.models.values())))
        self._decoding = DecodingChoice(engine, subject)
        self._decoding.about.render()
        with gr.Row():
            self.seed = seed_input()
            count = gr.Slider(
                1,
                engine.limits.images,
                value=1,
                step=1,
                precision=0,
                label="Images",
                info="One seed each.",
                min_width=120,
                buttons=[],
            )
        size = gr.Dropdown(
            **shown["size"],
            label="Size",
            info="Width × height in pixels, and the ratio.",
            filterable=False,
            elem_id="size",
        )
        negative = gr.Textbox(
            **shown["negative_prompt"],
            label="Negative prompt",
            info="What the image should not show; empty takes the model's own.",
            max_lines=2,
            elem_id="negative-prompt",
        )
        references = gr.Gallery(
            **shown["references"],
            interactive=True,
            label="References: pictures that the model reads with the prompt",
            type="pil",
            format="png",
            height=140,
            columns=4,
            buttons=[],
            elem_id="references",
        )
        with gr.Accordion("Advanced", open=False), gr.Row():
            order = gr.Dropdown(
                list(get_args(Order)),
                **shown["order"],
                label="Order of the tokens",
                info="Which part of the image is generated first.",
                filterable=False,
                min_width=150,
            )
            numbers = {
                name: gr.Number(**shown[name], label=label, info=info, step=step, precision=digits, min_width=150)
                for name, (label, info, step, digits) in NUMBERS.items()
            }
        # By the fields of a request; `size` is two.
        self._controls: dict[str, Any] = {
            "decoding": self._decoding.dropdown,
            "seed": self.seed,
            "count": count,
            "size": size,
            "negative_prompt": negative,
            "references": references,
            "order": order,
            **numbers,
        }
        self.inputs = [*self._controls.values()]
        self.outputs = [*self.inputs, self._decoding.about]

    def fields(self, model: str, values: dict[Any, Any]) -> dict[str, Any]:
        """The fields of a `Request`.

        Args:
            values: of all controls, by control.
        """
        given = {name: values[control] for name, control in self._controls.items()}
        size = given.pop("size")
        if size != AUTOMATIC:
            given["width"], given["height"] = map(int, size.split("x"))
        return given | {
            "decoding": chosen(self._engine.models[model], given["decoding"]),
            "negative_prompt": given["negative_prompt"] or None,
            "references": tuple(image for image, _ in given["references"] or []),
        }

    def show(self, model: str, request: Request | None = None) -> dict:
        """Show the settings that a model has, with its defaults or those of a request, and select its decoding."""
        info = self._engine.models[model]
        shown, decoding = _shown(info), None
        if request is not None:
            decoding = request.decoding
            shown |= {"seed": {}, "count": {}}
            given = {name: getattr(request, name) for name in shown if name not in ("size", "references")}
            if request.height or request.width:
                height, width = info.sizes[0]
                given["size"] = _value((request.height or height, request.width or width))
            for name, value in given.items():
                if value is not None:
                    shown[name]["value"] = value
        updates = {self._controls[name]: type(self._controls[name])(**update) for name, update in shown.items()}
        return updates | self._decoding.choices(model, decoding)


def _shown(info: ModelInfo) -> dict[str, dict[str, Any]]:
    """The default of each control that not all models have, and whether this one has it."""
    sizes = [(_label(size), _value(size)) for size in info.sizes]
    if info.references and len(sizes) > 1:
        sizes.insert(0, ("Automatic: like the last reference", AUTOMATIC))
    return {
        "size": {"choices": sizes, "value": sizes[0][1], "visible": len(sizes) > 1},
        "negative_prompt": {"value": "", "visible": info.negative_prompt},
        "references": {"value": None, "visible": info.references > 0},
        "order": {"value": info.order, "visible": info.order is not None},
        **{name: {"value": info.sampling.get(name), "visible": name in info.sampling} for name in NUMBERS},
    }


def _value(size: tuple[int, int]) -> str:
    return f"{size[1]}x{size[0]}"


def _label(size: tuple[int, int]) -> str:
    """Width and height, and their ratio in small whole numbers."""
    height, width = size
    ratio = Fraction(max(size), min(size)).limit_denominator(9)
    long, short = ratio.numerator, ratio.denominator
    return f"{width} × {height} · {f'{long}:{short}' if width >= height else f'{short}:{long}'}"
