"""The tables of a recipe: what each may hold, and the models, settings and data that they ask for."""

import inspect
import logging
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import psutil
import torch
from pydantic import BaseModel, Field, model_validator
from torch import nn

from ..decoding import decoding_from_name
from ..pipelines.base import ARPipeline
from ..pipelines.saving.saved_settings import give_defaults
from ..settings.schema import COMPLETE, Count, Flag, Layers, Share, Text, Width, check
from .data.captioned import ImageCaptions, Pixels, is_captioned, load_captioned_images
from .examples import Examples, load_examples
from .loop import OptimizerSettings
from .pixels import PixelSource, open_pixels
from .tokens.augmentation import Augmentation


logger = logging.getLogger(__name__)
Settings = TypeVar("Settings")
Model = TypeVar("Model", bound=nn.Module)


class Table(BaseModel):
    """A table in which an unknown setting is a mistake."""

    model_config = COMPLETE


class DataTable(Table):
    """Which rows of a training set are taken: the arguments of `load_captioned_images`."""

    styles: Annotated[list[Text], Field(min_length=1)] | None = None
    skin_tones: Flag = True
    groups: Annotated[list[Text], Field(min_length=1)] | None = None
    flags: Text | None = None
    weighted: Flag = True


class TrainingTable(Table):
    """How something is trained. `training` are the fields of its settings besides the optimizer."""

    optimizer: OptimizerSettings
    training: dict[str, Any] = {}


class ModelTable(TrainingTable):
    """What is trained, besides how: `model` are the arguments of its class."""

    model: dict[str, Any]


class TokenizerTable(Table):
    """As `ModelTable`, but that a `PatchVQModel` has no network to optimize."""

    kind: Literal["LlamaGenVQModel", "VARVQModel", "PatchVQModel"] = Field("LlamaGenVQModel", alias="class")
    model: dict[str, Any]
    optimizer: OptimizerSettings | None = None
    training: dict[str, Any] = {}
    start_from: Text | None = None
    data: DataTable = DataTable()
    scenes: Any = None

    @model_validator(mode="after")
    def check_optimizer(self) -> Self:
        needless = {"optimizer": self.optimizer, "start_from": self.start_from}
        if self.kind == "PatchVQModel":
            for name in [name for name, value in needless.items() if value is not None]:
                raise ValueError(f"{name} is given, and a PatchVQModel has no network: leave it out")
        elif self.optimizer is None:
            raise ValueError("optimizer is missing: add it")
        return self


class TransformerTable(ModelTable):
    """The class follows from the tokenizer where it is left out."""

    kind: Literal["LlamaGenTransformer", "ARPGTransformer", "LatentLlamaTransformer"] | None = Field(
        None, alias="class"
    )
    data: DataTable = DataTable()
    scenes: Any = None
    drafter: dict[str, Any] | None = None


class TextEncoderTable(Table):
    """The model whose text tokenizer and text encoder are taken, or the shape of a new encoder, as in `T5Config`."""

    start_from: Text | None = None
    d_model: Width = 512
    d_kv: Width = 64
    d_ff: Width = 2048
    num_layers: Layers = 6
    num_heads: Layers = 8
    dropout_rate: Share = 0.1


class UpscalerTable(ModelTable):
    data: DataTable = DataTable()


class CollaborateTable(Table):
    drafter_scales: Count
    drafter: TrainingTable
    refiner: TrainingTable


class DecodingTable(BaseModel):
    """The name of a preset, and settings of its decoding."""

    model_config = {"extra": "allow"}
    name: Text


class GenerationTable(Table):
    """The defaults of the trained pipeline."""

    sampling: dict[str, Any] = {}
    decoding: DecodingTable

    def give(self, pipe: ARPipeline) -> None:
        """Make them the defaults of `pipe`.

        Raises:
            ValueError: if one of them is not a setting of such a pipeline.
        """
        if "decoding" in self.sampling:
            raise ValueError(
                "table [generation.sampling]: decoding is not a setting: add a table [generation.decoding]"
            )
        give_defaults(pipe, self.sampling, "table [generation.sampling]")
        try:
            pipe.decoding = decoding_from_name(self.decoding.name, **(self.decoding.model_extra or {}))
        # Settings of a decoding may be of any type.
        except (ValueError, TypeError) as error:
            raise ValueError(f"table [generation.decoding]: {error}") from error


class Recipe(Table):
    """A recipe. Which tables it needs depends on what is trained.

    Attributes:
        examples: the module that makes pictures (the tables `scenes` of what is trained) or clips (the table `clips`)
            from those of the data set; see `Examples`.
        augmentation: how copies of an image differ that `arimage train tokens` encodes.
    """

    examples: Text | None = None
    image_size: Annotated[int, Field(strict=True, ge=8, le=2**11)]
    augmentation: Augmentation | None = None
    clips: Any = None
    tokenizer: TokenizerTable | None = None
    text_encoder: TextEncoderTable | None = None
    text_training: TrainingTable | None = None
    transformer: TransformerTable | None = None
    refiner: ModelTable | None = None
    drafter: TrainingTable | None = None
    distill: TrainingTable | None = None
    denoiser: TrainingTable | None = None
    upscaler: UpscalerTable | None = None
    collaborate: CollaborateTable | None = None
    generation: GenerationTable | None = None

    def table(self, name: str) -> Any:
        """The table of a name.

        Raises:
            ValueError: if the recipe has none.
        """
        found = getattr(self, name)
        if found is None:
            raise ValueError(f"it has no table [{name}]: add it, as in the recipe of an installed model")
        return found


def read_tables(recipe: dict, where: object = "the recipe") -> Recipe:
    """The tables of a recipe; `where` names its file.

    Raises:
        ValueError: if a table lacks a setting, has one that there is not, or one of a wrong type or range, or the
            module that `examples` names is not there.
    """
    tables = check(Recipe, recipe, where)
    if tables.clips is not None:
        tables.clips = _made(tables, "ClipSettings", tables.clips, where, "clips")
    for name in ("tokenizer", "transformer"):
        table = getattr(tables, name)
        if table is not None and table.scenes is not None:
            table.scenes = _made(tables, "SceneSettings", table.scenes, where, name, "scenes")
    return tables


def _made(recipe: Recipe, name: str, settings: object, where: object, *tables: str) -> Any:
    """The settings in a table, the last of `tables`, as the class `name` of the recipe's module checks them."""
    try:
        kind: Any = getattr(examples_of(recipe), name, None)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if kind is None:
        raise ValueError(
            f"{where}: examples is {recipe.examples!r}, and the table [{'.'.join(tables)}] needs a module with "
            f"{name}: give one"
        )
    # With the tables around it, so that errors name the whole path.
    for table in reversed(tables):
        kind, settings = dict[str, kind], {table: settings}
    found = check(kind, settings, where)
    for table in tables:
        found = found[table]
    return found


def is_token_recipe(path: Path) -> bool:
    """Whether a recipe is one for `arimage train model`."""
    return "pipeline" in tomllib.loads(path.read_text(encoding="utf-8"))


def examples_of(recipe: Recipe) -> Examples:
    """What makes the pictures or clips of a recipe."""
    return load_examples(recipe.examples)


def settings_of(kind: Callable[..., Settings], table: TrainingTable | TokenizerTable, name: str, **given) -> Settings:
    """The settings that a table describes. The recipe cannot set the fields `given`.

    Raises:
        ValueError: if a setting is not one of `kind`, or of a wrong type or range.
    """
    where = f"table [{name}.training]"
    if table.optimizer is not None:
        given = {"optimizer": table.optimizer, **given}
    for field in table.training.keys() & given.keys():
        raise ValueError(f"{where}: {field} is not a setting: leave it out")
    return check(kind, table.training | given, where)


def new_model(kind: Callable[..., Model], config: dict, name: str, **given) -> Model:
    """A model without memory for its weights, of the arguments `given` and those that the table `name` holds.

    Raises:
        ValueError: if an argument is not one of `kind`, they do not fit each other, or the weights fit in no memory.
    """
    for argument in config.keys() - (inspect.signature(kind).parameters.keys() - given.keys()):
        raise ValueError(f"table [{name}]: {argument} is not a setting: leave it out, or correct its name")
    try:
        with torch.device("meta"):
            model = kind(**given, **config)
    except ValueError as error:
        raise ValueError(f"table [{name}]: {error}") from error
    # They are made in float32, in the memory of the CPU.
    needed, there = 4 * sum(weight.numel() for weight in model.parameters()), psutil.virtual_memory().total
    if needed > there:
        raise ValueError(
            f"table [{name}]: the weights take {needed / 1e9:.0f} GB, and this machine has {there / 1e9:.0f}: give "
            "smaller sizes"
        )
    return model


def load_data(recipe: Recipe, part: str, path: str | Path, scale: int = 1) -> ImageCaptions:
    """The images of a file that the table `part` selects, `scale` times as large as `image_size`."""
    if Path(path).is_dir():
        raise ValueError(f"{path} is a folder, whose images have no captions: give a parquet file to train a {part}")
    return load_captioned_images(path, recipe.image_size * scale, **recipe.table(part).data.model_dump())


def load_both(
    recipe: Recipe, part: str, train: str | Path, heldout: str | Path
) -> tuple[ImageCaptions, ImageCaptions]:
    """`load_data` of a training set and of a held-out one."""
    data, heldout_data = (load_data(recipe, part, path) for path in (train, heldout))
    _warn_of_trained(data, heldout_data)
    return data, heldout_data


def _warn_of_trained(data: Pixels, heldout: Pixels) -> None:
    """Say how many held-out images are trained too: their figures are not those of new ones."""
    if isinstance(data, ImageCaptions) and isinstance(heldout, ImageCaptions):
        trained = {image.numpy().tobytes() for image in data.images}
        both = sum(image.numpy().tobytes() in trained for image in heldout.images)
    elif isinstance(data, PixelSource) and isinstance(heldout, PixelSource):
        both = data.shared_with(heldout)
    else:
        both = 0
    if both:
        logger.warning(
            f"{both} of {len(heldout)} held-out images are in --data too: figures that the log calls held-out are "
            "not those of new images, give others as --heldout"
        )


def load_pixels(
    recipe: Recipe,
    part: str,
    train: str | Path,
    heldout: str | Path,
    scale: int = 1,
    *,
    split: str = "train",
    heldout_split: str = "train",
    **options: Any,
) -> tuple[Pixels, Pixels]:
    """Images without their captions, `scale` times as large as `image_size`, and held-out ones: of a file for
    `load_captioned_images` those that the table `part` selects, in memory; of any other data set all, by `open_pixels`
    with `options`.

    Raises:
        ValueError: if they cannot be opened.
    """

    def load(data: str | Path, split: str) -> Pixels:
        if not is_captioned(data):
            return open_pixels(data, recipe.image_size * scale, split=split, **options)
        if split != "train":
            raise ValueError(f"{data} is read as a whole, and its split is {split}: leave the split out")
        return load_data(recipe, part, data, scale)

    data, heldout_data = load(train, split), load(heldout, heldout_split)
    _warn_of_trained(data, heldout_data)
    return data, heldout_data


def with_scenes(recipe: Recipe, part: str, data: ImageCaptions) -> ImageCaptions:
    """`data` with the pictures that the table `scenes` of `part` asks for."""
    settings = recipe.table(part).scenes
    return data if settings is None else examples_of(recipe).make_scenes(data, settings)


def load_clips(
    recipe: Recipe, part: str, train: str | Path, heldout: str | Path
) -> tuple[ImageCaptions, ImageCaptions]:
    """Clips of the objects in the file `train` without the held-out pairs of object and motion, and those pairs of
    `heldout`."""
    data, heldout_data = (load_data(recipe, part, path) for path in (train, heldout))
    settings, make_clips = recipe.table("clips"), examples_of(recipe).make_clips
    return make_clips(data, settings), make_clips(heldout_data, settings, held_out=True)
