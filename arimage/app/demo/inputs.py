"""What the inputs of the page and of the endpoints may hold, checked before Gradio sees it."""

import asyncio
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import gradio as gr
from gradio.block_function import BlockFunction
from gradio.state_holder import SessionState
from gradio.utils import get_upload_folder
from pydantic import BaseModel, Field, Strict, TypeAdapter, ValidationError, computed_field

from ...settings.schema import sentence
from ..engine.types import Limits, Refused
from ..engine.uploads import read_upload
from .controls import refusal


Text = Annotated[str, Strict()]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Whole = Annotated[int, Strict()]


class Upload(BaseModel):
    """An uploaded file. What else a client says about it is dropped."""

    path: Text

    @computed_field
    @property
    def meta(self) -> dict[str, str]:
        """How Gradio recognises a file."""
        return {"_type": "gradio.FileData"}


class GalleryItem(BaseModel):
    image: Upload
    caption: Text | None = None


class Drawing(BaseModel):
    background: Upload | None = None
    layers: list[Upload] = []
    composite: Upload | None = None


# The values of each kind of component.
KINDS: dict[type[gr.components.Component], Any] = {
    gr.Textbox: Text,
    gr.Dropdown: Text | list[Text],
    gr.JSON: list[Text],
    gr.Number: Number,
    gr.Slider: Number,
    gr.Dataset: Whole,
    gr.Image: Upload,
    gr.File: Upload,
    gr.Gallery: list[GalleryItem],
    gr.ImageEditor: Drawing,
}


# The choices that only some models have.
OPTIONAL = ("Order of the tokens",)


class Demo(gr.Blocks):
    """A page whose inputs have the types of their components, and whose files are uploads.

    Gradio alone copies any file that an input of any component names into the folder that it serves, unless the page
    was started by its own `launch`, and it fetches URLs.

    Args:
        limits: the limits on uploaded images.
    """

    def __init__(self, limits: Limits, **arguments):
        super().__init__(**arguments)
        self.limits = limits

    async def preprocess_data(
        self, block_fn: BlockFunction, inputs: list[Any], state: SessionState | None, explicit_call: bool = False
    ) -> list[Any]:
        """Check the values that a client sends to a function, then let Gradio read them. Every call of a function goes
        through here.

        Raises:
            gr.Error: if one has another type, or names a file that is not an uploaded image.
        """
        if len(inputs) != len(block_fn.inputs):
            raise refusal(f"{len(inputs)} values are given: give {len(block_fn.inputs)}")
        checked = await asyncio.to_thread(
            lambda: [self._checked(block, value) for block, value in zip(block_fn.inputs, inputs, strict=True)]
        )
        try:
            return await super().preprocess_data(block_fn, checked, state, explicit_call)
        # What is not among the choices of a component.
        except gr.Error as error:
            raise refusal(error.message) from error

    def _checked(self, block: Any, value: Any) -> Any:
        # Gradio keeps the values of states itself.
        if isinstance(block, gr.State):
            return None
        name = str(block.label).partition(":")[0]
        if value is None:
            if isinstance(block, gr.Slider | gr.Dataset) or (
                isinstance(block, gr.Dropdown) and block.value is not None and name not in OPTIONAL
            ):
                raise refusal(f"{name} is missing: choose one")
            return None
        kind = KINDS[type(block)]
        given, schema = {name: value}, _schema(Whole if getattr(block, "precision", None) == 0 else kind)
        try:
            valid = schema.validate_python(given)
        except ValidationError as error:
            raise refusal(sentence(error, given)) from error
        if isinstance(block, gr.Dataset) and not 0 <= value < len(block.samples):
            raise refusal(f"{name} is {value}: choose one of the {len(block.samples)} examples")
        for upload in _uploads(valid):
            self._check_upload(name, upload)
        return schema.dump_python(valid)[name]

    def _check_upload(self, name: str, upload: Upload) -> None:
        folder = Path(get_upload_folder()).resolve()
        try:
            path = Path(upload.path).resolve()
            uploaded = path.is_relative_to(folder) and path.is_file()
        # No path, such as one with a zero byte.
        except (ValueError, OSError):
            uploaded = False
        if not uploaded:
            raise refusal(f"{name} names a file that was not uploaded: upload it first")
        try:
            with path.open("rb") as file:
                # Gradio reads it again, and its errors are not sentences.
                read_upload(name, file, self.limits)
        except Refused as error:
            raise refusal(str(error)) from error


@cache
def _schema(kind: Any) -> TypeAdapter:
    """The schema of a value by its name."""
    return TypeAdapter(dict[str, kind])  # pyright: ignore[reportInvalidTypeForm]


def _uploads(value: Any) -> Iterator[Upload]:
    if isinstance(value, Upload):
        yield value
    elif isinstance(value, BaseModel | dict | list):
        parts = value if isinstance(value, list) else dict(value).values()
        for part in parts:
            yield from _uploads(part)
