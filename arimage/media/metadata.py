"""How a picture or a video was made, as JSON in its file: one form for the commands, the server, the demo and ComfyUI.

It is the text "arimage" of a PNG, the EXIF user comment of a JPEG or WebP, and the comment of a GIF or MP4.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from PIL import ExifTags, Image
from PIL.PngImagePlugin import PngInfo
from pydantic import BaseModel, Field

from .. import __version__
from ..decoding.names import Order
from ..settings.schema import COMPLETE, LARGEST, Count, Number, Share, Text, check
from .texts import parse_json


# The text of a PNG.
KEY = "arimage"
# Of the JSON, in characters: more than two prompts of 10,000 have. Sheets of more prompts are written without it.
MAX_CHARACTERS = 2**16
# The most that the EXIF data of a JPEG holds, less what else is in it.
MAX_EXIF = 65_000
# Settings that may differ from scale to scale.
PER_SCALE = ("guidance_scale", "temperature")
# How EXIF says that a comment is in UTF-16.
UNICODE = b"UNICODE\0"
# In GIF and MP4 files, whose comments may be anything.
MARK = "arimage "

Prompt = Annotated[str, Field(strict=True, max_length=10_000)]
ClassLabel = Annotated[int, Field(strict=True, ge=0, le=LARGEST)] | Text
Place = Annotated[str, Field(strict=True, min_length=1, max_length=5000)]
Images = Annotated[int, Field(strict=True, ge=1, le=10_000)]
Side = Annotated[int, Field(strict=True, ge=1, le=2**14)]


class Metadata(BaseModel):
    """The settings that make a picture again. They have the names of the options of `arimage generate`; what is None
    is the default of the model.

    Attributes:
        version: of arimage.
        model: its name, folder or Hub id; of a folder with an absolute path the last part only.
        prompt, class_label: one of them, or neither for a video that continues something.
        prompts, class_labels: in their place, those of a sheet of several, with equally many images of each.
        seed: of the picture, or of the first of several on a sheet.
        count: how many there are on a sheet.
        batch_size: how many images were generated at a time, as copies of one give its bits again.
        lora: the active adapters, FILE:SCALE each.
        made_from: the options that gave it files. They are not in the picture.
    """

    model_config = COMPLETE

    version: Text
    model: Place
    prompt: Prompt | None = None
    prompts: Annotated[list[Prompt], Field(min_length=2)] | None = None
    class_label: ClassLabel | None = None
    class_labels: Annotated[list[ClassLabel], Field(min_length=2)] | None = None
    negative_prompt: Prompt | None = None
    seed: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)]
    count: Images = 1
    batch_size: Images = 1
    decoding: Text | None = None
    order: Order | None = None
    task: Text | None = None
    guidance_scale: Number | None = None
    temperature: Number | None = None
    top_k: Annotated[int, Field(strict=True, ge=0, le=2**63 - 1)] | None = None
    top_p: Share | None = None
    min_p: Share | None = None
    num_inference_steps: Count | None = None
    decoder_guidance_scale: Number | None = None
    height: Side | None = None
    width: Side | None = None
    num_frames: Count | None = None
    lora: Annotated[list[Place], Field(max_length=100)] | None = None
    dtype: Literal["float32", "bfloat16", "float16", "int8", "float8"] | None = None
    made_from: list[Literal["image", "mask_image", "video"]] | None = None


def to_text(settings: Mapping[str, Any]) -> str:
    """`Metadata` as JSON, of settings by its names. Those that have their default are left out, and numbers for each
    scale, which only a checkpoint has."""
    fields, settings = Metadata.model_fields, {"version": __version__, **settings}
    given = {
        name: settings[name]
        for name in sorted(settings, key=[*fields].index)
        if settings[name] != fields[name].default
        and not (name in PER_SCALE and isinstance(settings[name], list | tuple))
    }
    text = json.dumps(given, ensure_ascii=False)
    # The name of a folder may hold bytes that are not UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def from_text(name: str, text: str | None) -> Metadata:
    """The metadata in a file, whose `name` begins the sentence of an error: "--from is x.png, which".

    Raises:
        ValueError: if there is none, or it is not of this form.
    """
    if text is None:
        raise ValueError(f"{name} does not say how it was made: give a picture that arimage wrote, without edits")
    remedy = "give a picture as arimage wrote it"
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{name} has metadata of {len(text)} characters: {remedy}")
    return check(Metadata, parse_json(text, f"the metadata of the file: {name}", remedy), name)


def saving(suffix: str, text: str | None, note: str = "") -> dict[str, Any]:
    """The arguments of Pillow's `save` for a file with this suffix that hold a text of `to_text`, and in GIF and WebP
    files also a note. JPEG files do not hold texts that are longer than their EXIF data may be."""
    if suffix == ".png":
        if text is None:
            return {}
        info = PngInfo()
        info.add_itxt(KEY, text)
        return {"pnginfo": info}
    if suffix == ".gif":
        return {"comment": "\n".join(filter(None, [note, text and MARK + text]))}
    exif = Image.Exif()
    if note:
        exif[ExifTags.Base.ImageDescription] = note
    comment = UNICODE + (text or "").encode("utf-16-be")
    if text is not None and not (suffix in (".jpg", ".jpeg") and len(comment) > MAX_EXIF):
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment] = comment
    return {"exif": exif} if note or text else {}


def in_comment(comment: str) -> str | None:
    """The text in the comment of a GIF or MP4 file."""
    lines = [line.removeprefix(MARK) for line in comment.split("\n") if line.startswith(MARK)]
    return lines[0] if lines else None


def in_image(info: Mapping[Any, Any], exif: Image.Exif) -> str | None:
    """The text in an image, by its `info` and EXIF data."""
    comment = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
    if isinstance(comment, bytes) and comment.startswith(UNICODE):
        # Damaged text is not JSON.
        return comment.removeprefix(UNICODE).decode("utf-16-be", "replace")
    if isinstance(info.get("comment"), bytes):
        return in_comment(info["comment"].decode("utf-8", "replace"))
    text = info.get(KEY)
    return text if isinstance(text, str) else None
