"""The tables of the recipes of emoji: what each may hold, and the settings and data that they ask for."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from arimage.settings.schema import Flag, Text, check
from arimage.training.loop import OptimizerSettings
from arimage.training.recipe import GenerationTable, Table, TextEncoderTable, TokenizerRecipe

from ..data.animation import ClipSettings, make_clips
from ..data.scenes import SceneSettings, make_scenes
from .captioned import ImageCaptions, load_captioned_images


logger = logging.getLogger(__name__)
Settings = TypeVar("Settings")


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
    """A `TokenizerRecipe`, whose images are those of `data` and `scenes`."""

    kind: Literal["LlamaGenVQModel", "VARVQModel", "PatchVQModel"] = Field("LlamaGenVQModel", alias="class")
    model: dict[str, Any]
    optimizer: OptimizerSettings | None = None
    training: dict[str, Any] = {}
    start_from: Text | None = None
    data: DataTable = DataTable()
    scenes: SceneSettings | None = None


class TransformerTable(ModelTable):
    """The class follows from the tokenizer where it is left out."""

    kind: Literal["LlamaGenTransformer", "ARPGTransformer", "LatentLlamaTransformer"] | None = Field(
        None, alias="class"
    )
    data: DataTable = DataTable()
    scenes: SceneSettings | None = None
    drafter: dict[str, Any] | None = None


class Recipe(Table):
    """A recipe. Which tables it needs depends on what is trained. Its `clips` are made from the pictures of the data
    set, and so are the `scenes` of what is trained."""

    image_size: Annotated[int, Field(strict=True, ge=8, le=2**11)]
    clips: ClipSettings | None = None
    tokenizer: TokenizerTable | None = None
    text_encoder: TextEncoderTable | None = None
    text_training: TrainingTable | None = None
    transformer: TransformerTable | None = None
    refiner: ModelTable | None = None
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

    @property
    def image_tokenizer(self) -> TokenizerRecipe:
        """The recipe of the image tokenizer alone."""
        table = self.table("tokenizer")
        parts = {name: getattr(table, name) for name in ("start_from", "model", "optimizer", "training")}
        return check(
            TokenizerRecipe, {"tokenizer": table.kind, "image_size": self.image_size, **parts}, "table [tokenizer]"
        )


def read_tables(recipe: dict, where: object = "the recipe") -> Recipe:
    """The tables of a recipe; `where` names its file.

    Raises:
        ValueError: if a table lacks a setting, has one that there is not, or one of a wrong type or range.
    """
    return check(Recipe, recipe, where)


def settings_of(kind: Callable[..., Settings], table: TrainingTable, name: str, **given) -> Settings:
    """The settings that a table describes. The recipe cannot set the fields `given`.

    Raises:
        ValueError: if a setting is not one of `kind`, or of a wrong type or range.
    """
    where, given = f"table [{name}.training]", {"optimizer": table.optimizer, **given}
    for field in table.training.keys() & given.keys():
        raise ValueError(f"{where}: {field} is not a setting: leave it out")
    return check(kind, table.training | given, where)


def load_data(recipe: Recipe, part: str, path: str | Path, scale: int = 1) -> ImageCaptions:
    """The images of a file that the table `part` selects, `scale` times as large as `image_size`."""
    return load_captioned_images(path, recipe.image_size * scale, **recipe.table(part).data.model_dump())


def load_both(
    recipe: Recipe, part: str, train: str | Path, heldout: str | Path
) -> tuple[ImageCaptions, ImageCaptions]:
    """`load_data` of a training set and of a held-out one. Images that are in both are counted in a warning."""
    data, heldout_data = (load_data(recipe, part, path) for path in (train, heldout))
    trained = {image.numpy().tobytes() for image in data.images}
    if both := sum(image.numpy().tobytes() in trained for image in heldout_data.images):
        logger.warning(
            f"{both} of {len(heldout_data)} held-out images are in --data too: figures that the log calls held-out "
            "are not those of new images, give others as --heldout"
        )
    return data, heldout_data


def with_scenes(recipe: Recipe, part: str, data: ImageCaptions) -> ImageCaptions:
    """`data` with the pictures that the table `scenes` of `part` asks for."""
    settings = recipe.table(part).scenes
    return data if settings is None else make_scenes(data, settings)


def load_clips(
    recipe: Recipe, part: str, train: str | Path, heldout: str | Path
) -> tuple[ImageCaptions, ImageCaptions]:
    """Clips of the objects in the file `train` without the held-out pairs of object and motion, and those pairs of
    `heldout`."""
    data, heldout_data = (load_data(recipe, part, path) for path in (train, heldout))
    settings = recipe.table("clips")
    return make_clips(data, settings), make_clips(heldout_data, settings, held_out=True)
