"""What a family of models declares about itself, in its `family.py`. No heavy imports: the command line reads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HubFiles:
    """Files of one repository on the Hugging Face Hub.

    Attributes:
        repository (`str`): owner/name.
        patterns (`tuple[str, ...]`): the name of one file, or patterns of the names of several.
    """

    repository: str
    patterns: tuple[str, ...]

    @property
    def file(self) -> str | None:
        """The one file; `None` if there are several, which a converter takes as a folder."""
        return self.patterns[0] if len(self.patterns) == 1 and "*" not in self.patterns[0] else None


@dataclass(frozen=True)
class RequestedFiles:
    """Files that a converter needs and that their authors give out on request only.

    Attributes:
        argument (`str`): of the converter, which takes their folder.
        folder (`str`): name of the folder, next to those of converted models.
        names (`tuple[str, ...]`): of the files.
        content (`str`): what they are, and who gives them out.
        page (`str`): where to request them.
        alternatives (`str`): models that need no request.
        note (`str`): for the list of models.
    """

    argument: str
    folder: str
    names: tuple[str, ...]
    content: str
    page: str
    alternatives: str
    note: str


@dataclass(frozen=True)
class PublishedCheckpoint:
    """Where a checkpoint is published, and what its files do not say.

    Attributes:
        name (`str`): for `AutoPipeline.from_pretrained` and `load_published`.
        family (`str`): which converter takes it: `convert_<family>`; "" for a folder that is a pipeline already.
        files (`dict[str, HubFiles]`): what that converter takes, by the names of its arguments. `revision` is one of
            the first repository.
        image_size (`int`): longer side in pixels of the images, or of the frames, that it was trained for.
        parameters (`int`): of the component that generates.
        download (`int`): bytes of the files, rounded.
        licence (`str`): of the weights; "(code)" after it if only that of the authors' code is known.
        licence_source (`str`): the authors' page that says so.
        other_parameters (`int`): of an image tokenizer and a text encoder that are components of their own.
        bytes_per_parameter (`int`): in the files, and in the converted pipeline.
        options (`dict`): further arguments of the converter.
        requested (`RequestedFiles`, *optional*): what the converter takes besides, from no repository.
    """

    name: str
    family: str
    files: dict[str, HubFiles]
    image_size: int
    parameters: int
    download: int
    licence: str
    licence_source: str
    other_parameters: int = 0
    bytes_per_parameter: int = 2
    options: dict = field(default_factory=dict)
    requested: RequestedFiles | None = None

    @property
    def repository(self) -> str:
        return next(iter(self.files.values())).repository

    @property
    def all_parameters(self) -> int:
        return self.parameters + self.other_parameters

    @property
    def converted(self) -> int:
        """Bytes of the converted pipeline, rounded; 0 if nothing is converted."""
        return 0 if not self.family else self.all_parameters * self.bytes_per_parameter


# What a command checks of a path before it imports a framework.
FILE, FOLDER, FILE_OR_FOLDER, VACANT = "file", "folder", "file or folder", "vacant folder"
REQUIRED = object()


@dataclass(frozen=True)
class Argument:
    """An argument of a converter on the command line.

    Attributes:
        name: that of the converter's argument; the option is `--name`.
        help: what `--help` says.
        type: of its value; a `Literal` lists choices.
        default: its value if it is not given.
        path: what a path must be: `FILE`, `FOLDER`, `FILE_OR_FOLDER` or `VACANT`.
        positional: whether it is given without its name.
    """

    name: str
    help: str
    type: Any = str
    default: Any = REQUIRED
    path: str | None = None
    positional: bool = False


def path(name: str, help: str, must_be: str = FILE, default: Any = REQUIRED, positional: bool = False) -> Argument:
    """An argument that is a path."""
    return Argument(name, help, Path | None if default is None else Path, default, must_be, positional)


def folder(help: str) -> Argument:
    """The published folder that a converter takes."""
    return path("folder", help, FOLDER, positional=True)


# Arguments of several converters. Each takes `OUT`.
OUT = path("out", "Folder to write; new or empty.", VACANT)
TRANSFORMER = path("transformer", "File of the transformer: .pt, .pth or .safetensors.")
TOKENIZER = path("tokenizer", "File of the image tokenizer.")
NUM_HEADS = Argument("num_heads", "Attention heads, if the transformer has no published size.", int | None, None)
EMA = Argument(
    "ema", "Take the averaged weights (EMA) of the transformer, if a trainer's checkpoint has them.", bool, False
)


@dataclass(frozen=True)
class Converter:
    """A converter from published files: the function `convert_<name>` and its command `arimage convert <name>`.

    Attributes:
        name: of both.
        help: what `--help` says.
        arguments: besides `OUT`; None if it has no command.
        module: in the family's folder.
    """

    name: str
    help: str = ""
    arguments: tuple[Argument, ...] | None = None
    module: str = "convert"

    @property
    def function(self) -> str:
        return f"convert_{self.name}"

    @property
    def command(self) -> str:
        return f"arimage convert {self.name.replace('_', '-')}"


@dataclass(frozen=True)
class ModelType:
    """How a published folder is recognised.

    Attributes:
        name: the `model_type` of its config.json.
        converter: the name of the converter that takes it.
        tensor: the end of a tensor's name that tells it from folders of other families with the same `model_type`.
    """

    name: str
    converter: str
    tensor: str = ""


@dataclass(frozen=True)
class Family:
    """A family of models. Its folder holds all that only this family uses.

    Attributes:
        title: as people write it.
        pipelines: its pipeline classes and the modules in the folder that define them.
        exports: further public names of arimage, with their modules.
        videos: whether its pipelines generate videos.
        builds_on: families whose modules it imports, since its models are made from theirs.
        converters: from published files.
        checkpoints: the published checkpoints that are downloaded and converted by their name.
        instead: repositories of the same authors that cannot generate images here, and what can.
        model_types: how a published folder is recognised.
        config: its fields of model_index.json, with their types.
        defaults: its default arguments of calls beyond those of all families, with their types.
    """

    title: str
    pipelines: Mapping[str, str]
    exports: Mapping[str, str] = field(default_factory=dict)
    videos: bool = False
    builds_on: tuple[str, ...] = ()
    converters: tuple[Converter, ...] = ()
    checkpoints: tuple[PublishedCheckpoint, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)
    model_types: tuple[ModelType, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
