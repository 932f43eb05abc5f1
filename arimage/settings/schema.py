"""Schemas of settings that come from files: types of fields, and what pydantic refuses in one sentence; and which
files may be read. No heavy imports."""

import functools
import inspect
import json
import re
import reprlib
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model, validate_call


# Bytes of a file that is read whole: more than the largest image that is read has, or a list of prompts.
MAX_BYTES = 2**30
# A yes or no, a whole number, a number and a text of exactly that type: "3" is not 3, and true is not 1.
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1, max_length=1000)]
# A caption, or the name of a class, which may be as long as a book.
Caption = Annotated[str, Field(strict=True, min_length=1, max_length=2**24)]
Whole = Annotated[int, Field(strict=True, ge=0, le=10**6)]
Count = Annotated[int, Field(strict=True, ge=1, le=10**6)]
# Rows of a data set, its images or classes, and steps through it: up to more than there are anywhere.
LARGEST = 2**48
Rows = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Items = Steps = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
# Classes, of which the weights of embeddings are still counted in 64 bits.
Classes = Annotated[int, Field(strict=True, ge=1, le=2**40)]
Seed = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1e9)]
Positive = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1e9)]
Share = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=1)]
# How a network is trained: a learning rate, the decay of a moving average, the images of a step, and the processes
# that prepare them.
Rate = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=10)]
Decay = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, lt=1)]
Batch = Annotated[int, Field(strict=True, ge=1, le=2**16)]
Workers = Annotated[int, Field(strict=True, ge=0, le=256)]
# The shape of a network: its layers, the width of one or of several, tokens along a side, the sides of maps from
# coarse to fine, and what keeps a division finite.
Layers = Annotated[int, Field(strict=True, ge=1, le=1000)]
Width = Annotated[int, Field(strict=True, ge=1, le=2**17)]
Widths = Annotated[tuple[Width, ...], Field(min_length=1, max_length=20)]
Side = Annotated[int, Field(strict=True, ge=1, le=2**10)]
# The side and the area of an image in pixels.
Pixels = Annotated[int, Field(strict=True, ge=8, le=2**13)]
Area = Annotated[int, Field(strict=True, ge=64, le=2**26)]
Scales = Annotated[tuple[Side, ...], Field(min_length=2, max_length=100)]
Epsilon = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0, le=1)]

# The configuration of models and dataclasses that describe files: a setting that they do not have is a mistake.
COMPLETE = ConfigDict(extra="forbid")

# What to give instead, by the type of pydantic's error.
_REMEDIES = {
    "bool_type": "true or false",
    "bytes_type": "the bytes of a file",
    "bytes_too_short": "the bytes of a file",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a text",
    "string_too_short": "a text that is not empty",
    "string_too_long": "a text of at most {max_length} characters",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "list_type": "a list",
    "tuple_type": "a list",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "dict_type": "a table of settings",
    "model_type": "a table of settings",
    "dataclass_type": "a table of settings",
}
T = TypeVar("T")
Init = TypeVar("Init", bound=Callable)
Fields = TypeVar("Fields", bound=BaseModel)


def check(kind: type[T] | Any, value: object, where: object) -> T:
    """`value`, from a file, as the type, model or dataclass `kind`; `where` names the file.

    Raises:
        ValueError: one sentence that names file, setting and remedy.
    """
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{where}: {sentence(error, value)}") from error


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    return TypeAdapter(kind)


def with_fields(kind: type[Fields], fields: Mapping[str, Any]) -> type[Fields]:
    """A model with further fields, given by their types, which may be absent."""
    further: dict[str, Any] = {name: (type, None) for name, type in fields.items()}
    return create_model(kind.__name__, __base__=kind, **further)


def checked(init: Init) -> Init:
    """Check the arguments of a constructor against its annotations; lists become tuples where those are asked for.

    Raises:
        ValueError: one sentence that names the argument and the remedy.
    """
    validated, signature = validate_call(init), inspect.signature(init)

    @functools.wraps(init)
    def check_and_init(self, *args, **kwargs):
        # By name, as the sentence needs it. Unknown names raise TypeError.
        named = signature.bind(self, *args, **kwargs).arguments
        del named["self"]
        try:
            validated(self, **named)
        except ValidationError as error:
            raise ValueError(sentence(error, named)) from error

    return check_and_init  # pyright: ignore[reportReturnType]


def sentence(error: ValidationError, value: object) -> str:
    """The first thing that pydantic refused in `value`, as in "a.b[2] is -1: give at least 0"."""
    first = error.errors(include_url=False)[0]
    kind, context = first["type"], first.get("ctx", {})
    name = _name(first["loc"], value, kind == "missing")
    if kind == "missing":
        return f"{name} is missing: add it"
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{name} is not a setting: leave it out, or correct its name"
    if kind == "value_error":
        return f"{name}: {context['error']}" if name else str(context["error"])
    remedy = _REMEDIES.get(kind)
    advice = first["msg"] if remedy is None else "give " + remedy.format(**context)
    return f"{name or 'it'} is {reprlib.repr(first['input'])}: {advice}"


def _name(path: tuple[int | str, ...], value: Any, missing: bool) -> str:
    """The place of an error in a value, without the names that pydantic gives to the choices of a union."""
    name = ""
    for number, part in enumerate(path):
        inside = isinstance(value, dict) and part in value
        inside = inside or (isinstance(value, list | tuple) and isinstance(part, int) and part < len(value))
        if inside or (missing and number == len(path) - 1):
            name += f"[{part}]" if isinstance(part, int) else f".{part}"
            value = value[part] if inside else None  # pyright: ignore[reportCallIssue, reportArgumentType]
    return name.removeprefix(".")


def check_encodable(name: str, text: str) -> None:
    """Refuse a text that UTF-8 cannot encode: half a character, or bytes of the command line in another encoding.

    Raises:
        ValueError: naming the text.
    """
    if re.search("[\ud800-\udfff]", text):
        raise ValueError(
            f"the {name} {reprlib.repr(text)} holds half a surrogate pair, or a byte that is not UTF-8: give it as "
            "UTF-8"
        )


def check_regular(name: str, path: Path, most: int | None = MAX_BYTES) -> None:
    """Refuse what must not be read whole: a pipe or a device, which may have no end, and a file of more than `most`
    bytes. Nothing of it is read.

    Raises:
        ValueError: naming the file; a folder too.
        OSError: if there is none.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise ValueError(f"{name} is {kind}: give a file")
    if most is not None and status.st_size > most:
        raise ValueError(f"{name} has {status.st_size} bytes, more than {most}: give a smaller file")


def read_whole(path: Path, name: str | None = None) -> bytes:
    """The bytes of a file that `check_regular` takes. `name` begins the sentence of an error, by default the path.

    Raises:
        ValueError: if it is no file, or too large.
        OSError: if it cannot be read.
    """
    check_regular(name or str(path), path)
    return path.read_bytes()


def read_object(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        ValueError: if the file is missing or not JSON, or holds something else.
    """
    if path.exists() and not path.is_file():
        # A pipe would be waited for, and a device read for ever.
        raise ValueError(f"{path} is not a file: get it again")
    try:
        value = json.loads(read_whole(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}): get the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object: get the file again")
    return value
