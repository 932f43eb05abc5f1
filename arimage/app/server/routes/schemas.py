"""The bodies of the OpenAI Images API: fields, images, answers and errors."""

import base64
import dataclasses
import io
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ....media.files import transparent_part
from ....media.metadata import KEY, saving
from ...engine.models import ModelInfo
from ...engine.types import SAMPLING, Refused, Request, Result
from ..bodies import MAX_FILES


MEDIA_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
# Fields of `Request` that are those of the API.
UNCHANGED = (
    *SAMPLING, "class_label", "decoding", "negative_prompt", "num_inference_steps", "decoder_guidance_scale", "order",
)  # fmt: skip
# How many classes the list of models has to try.
EXAMPLES = 5
SIZE = r"^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"


def size_of(text: str | None) -> tuple[int, int] | None:
    """Height and width from a text of the form `SIZE`; None for "auto"."""
    if text in (None, "auto"):
        return None
    width, height = map(int, text.split("x"))
    return height, width


class Fields(BaseModel):
    """The fields that a client may send, apart from the files of an edit."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    prompt: str | None = None
    model: str | None = None
    n: int | None = Field(None, ge=1)
    size: str | None = Field(None, pattern=SIZE)
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(None, ge=0, le=100)
    stream: bool | None = None
    partial_images: int | None = Field(None, ge=0, le=3)

    # Extensions of the OpenAI API.
    class_label: int | None = None
    seed: int | None = None
    decoding: str | None = Field(None, max_length=200)
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    negative_prompt: str | None = None
    num_inference_steps: int | None = None
    decoder_guidance_scale: float | None = None
    order: str | None = None

    # Accepted without effect.
    background: str | None = None
    complexity: str | None = None
    input_fidelity: str | None = None
    moderation: str | None = None
    quality: str | None = None
    safety_identifier: str | None = None
    style: str | None = None
    user: str | None = None

    @classmethod
    def read(cls, body: bytes | Mapping[str, Any] | None, lenient: bool, strict: bool = True) -> "Fields":
        """The fields of JSON or of a form. A lenient server has unknown ones in `model_extra`, and takes "2" for 2.

        Args:
            body: JSON as bytes, or what was read already.
            strict: whether numbers must be numbers, which those of a form are not.

        Raises:
            pydantic.ValidationError: if one is wrong or, unless the server is lenient, unknown.
        """
        form, strict = (LenientFields, False) if lenient else (cls, strict)
        if isinstance(body, bytes):
            return form.model_validate_json(body, strict=strict)
        return form.model_validate(body, strict=strict)

    def to_request(
        self, model: str, client: str, image: Image.Image | None = None, mask_image: Image.Image | None = None
    ) -> Request:
        """The request for the engine, without references. Without a seed, or with -1, it gets a random one.

        Raises:
            Refused: if it asks for several images as a stream, or for a transparent JPEG.
        """
        if self.stream and self.n not in (None, 1):
            raise Refused(f"a stream has one image, not {self.n}: leave out n, or stream", "n")
        if self.background == "transparent" and self.output_format == "jpeg":
            raise Refused("a jpeg has no transparent background: leave out background, or ask for png", "background")
        height, width = size_of(self.size) or (None, None)
        return Request(
            model=model,
            # OpenAI's client always sends a prompt, empty for a class.
            prompt=self.prompt or None,
            count=1 if self.n is None else self.n,
            seed=secrets.randbelow(2**32) if self.seed in (None, -1) else self.seed,
            height=height,
            width=width,
            **{name: getattr(self, name) for name in UNCHANGED},
            image=image,
            mask_image=mask_image,
            client=client,
            previews=(self.partial_images or 0) if self.stream else 0,
        )

    def encode(self, image: Image.Image) -> bytes:
        """An image as a file in the requested format, with its metadata."""
        data = io.BytesIO()
        quality = 100 if self.output_compression is None else self.output_compression
        kind = self.output_format or "png"
        image.save(data, kind, quality=quality, **saving(f".{kind}", image.info.get(KEY)))
        return data.getvalue()


class LenientFields(Fields):
    """The same fields. Others are in `model_extra` instead of being refused."""

    model_config = ConfigDict(extra="allow")


class EmbeddedImage(BaseModel):
    """An image in the body itself, as a data URL with base64. The server fetches no addresses and stores no files."""

    model_config = ConfigDict(extra="forbid")

    image_url: str

    @model_validator(mode="before")
    @classmethod
    def _of_a_text(cls, value: Any) -> Any:
        """The URL alone, as some clients send it."""
        return {"image_url": value} if isinstance(value, str) else value

    def read(self, name: str) -> bytes:
        """The bytes of the file.

        Raises:
            Refused: if it is another kind of URL, or not base64.
        """
        head, _, data = self.image_url.partition(",")
        if not re.fullmatch(r"data:[\w./+-]*;base64", head, re.ASCII | re.IGNORECASE):
            raise Refused(f"image_url of {name} is not a data URL: send data:image/png;base64,... instead", name)
        try:
            return base64.b64decode(data, validate=True)
        except ValueError as error:
            raise Refused(f"image_url of {name} is not base64: encode the whole file", name) from error


class EmbeddedImages(BaseModel):
    """The images of an edit whose body is JSON; `model_extra` has its other fields."""

    model_config = ConfigDict(extra="allow")

    images: list[EmbeddedImage] = Field(min_length=1, max_length=MAX_FILES)
    mask: EmbeddedImage | None = None

    def read(self) -> dict[str, list[bytes]]:
        """The files by field, as those of a form."""
        files = {"image": [image.read("image") for image in self.images]}
        return files if self.mask is None else files | {"mask": [self.mask.read("mask")]}


class EditFields(EmbeddedImages, Fields):
    """All fields of an edit whose body is JSON, for the description of the API."""


def body_of(**models: type[BaseModel]) -> dict:
    """The description of a body that a route reads itself, by media type. Schemas within schemas are written out."""
    content = {name: {"schema": _inlined(model.model_json_schema())} for name, model in models.items()}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(schema: Any, definitions: Mapping[str, Any] | None = None) -> Any:
    if isinstance(schema, list):
        return [_inlined(part, definitions) for part in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = definitions or schema.get("$defs", {})
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {name: _inlined(part, definitions) for name, part in schema.items() if name != "$defs"}


@dataclass
class Notes:
    """What an answer says about a request that was not taken as it was.

    Attributes:
        ignored: fields without effect.
        edited: "whole" for an edit that had no mask.
        tokens: tokens of all images.
    """

    ignored: list[str]
    edited: str | None
    tokens: int = 0

    @property
    def usage(self) -> dict:
        """As in the OpenAI API. Tokens of the prompt are not counted."""
        details = {"input_tokens": 0, "input_tokens_details": {"image_tokens": 0, "text_tokens": 0}}
        return details | {"output_tokens": self.tokens, "total_tokens": self.tokens}


def read_mask(image: Image.Image, mask: Image.Image | None) -> Image.Image:
    """The mask of an edit: white where `mask`, or without one `image` itself, is transparent, as in the OpenAI API.

    Raises:
        Refused: if it is transparent nowhere.
    """
    try:
        return transparent_part("the mask", image if mask is None else mask)
    except ValueError as error:
        if mask is None:
            raise Refused(
                "no mask was sent, and image has no transparency: send a mask, or make image transparent where it "
                "should change",
                "mask",
            ) from error
        raise Refused(str(error), "mask") from error


def answer(result: Result, fields: Fields, data: list[dict], notes: Notes) -> dict:
    """The body of a finished request. Fields that the OpenAI API does not have are under "arimage"."""
    return {
        "created": int(time.time()),
        "data": data,
        "background": "opaque",
        "size": f"{result.settings['width']}x{result.settings['height']}",
        "output_format": fields.output_format or "png",
        "usage": notes.usage,
        "arimage": facts(result, notes),
    }


def event(own: dict, image: Image.Image, file: bytes, fields: Fields) -> dict:
    """An event of a stream with an image; `own` has its type and the fields of this type."""
    return {
        **own,
        "b64_json": base64.b64encode(file).decode(),
        "background": "opaque",
        "created_at": int(time.time()),
        # OpenAI's type needs one.
        "quality": "auto",
        "size": f"{image.width}x{image.height}",
        "output_format": fields.output_format or "png",
    }


def facts(result: Result, notes: Notes) -> dict:
    return {
        "ignored": notes.ignored,
        **({"edited": notes.edited} if notes.edited else {}),
        "model": result.settings["model"],
        "seeds": result.seeds,
        "decoding": result.decoding,
        "exact": result.exact,
        "passes": result.passes,
        "tokens_per_pass": result.tokens_per_pass,
        "seconds": result.seconds,
        "unknown_prompt": result.unknown and dataclasses.asdict(result.unknown),
        "settings": result.settings,
    }


def describe_model(name: str, model: str, info: ModelInfo, started: int) -> dict:
    """The entry of a model in the list of models, under its name or an alias."""
    fields = dataclasses.asdict(info)
    # Not the folder of their pictures, a path of this machine.
    names, classes, _ = fields.pop("names"), fields.pop("class_names"), fields.pop("gallery")
    if info.classes is not None:
        fields["examples"] = (classes or [])[:EXAMPLES]
    sizes = [f"{width}x{height}" for height, width in info.sizes]
    edits = info.edits or info.references > 0
    routes = ["/v1/images/generations", "/v1/chat/completions", "/v1/responses"]
    routes += ["/v1/images/edits"] * edits + ["/v1/images/variations"] * (info.references > 0)
    if info.frame_counts:
        routes, fields["seconds"] = ["/v1/videos"], [f"{count / info.fps:.3g}" for count in info.frame_counts]
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "arimage",
        "arimage": fields | {"model": model, "routes": routes, "sizes": sizes, "names": list(names) or classes},
    }
