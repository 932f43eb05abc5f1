"""Recipes: a TOML file says what is trained, of what shape and how. All have the tables `model`, the arguments of what
is trained, `optimizer`, and `training`, the settings of its training; another setting says what it is."""

import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import psutil
import torch
from pydantic import BaseModel, Field, field_validator, model_validator
from torch import nn

from ..decoding import decoding_from_name
from ..families import PIPELINES
from ..media.texts import read_text
from ..pipelines.base import ARPipeline
from ..pipelines.saving.saved_settings import give_defaults
from ..settings.installed import installed_files, not_installed
from ..settings.schema import COMPLETE, Layers, Share, Text, Width, check
from .loop import OptimizerSettings
from .tokens.augmentation import Augmentation


RECIPES = Path(__file__).parent / "recipes"

Settings = TypeVar("Settings")
Model = TypeVar("Model", bound=nn.Module)


class Table(BaseModel):
    """A table in which an unknown setting is a mistake."""

    model_config = COMPLETE


class TextEncoderTable(Table):
    """The model whose text tokenizer and text encoder are taken, or the shape of a new encoder, as in `T5Config`."""

    start_from: Text | None = None
    d_model: Width = 512
    d_kv: Width = 64
    d_ff: Width = 2048
    num_layers: Layers = 6
    num_heads: Layers = 8
    dropout_rate: Share = 0.1


class DecodingTable(BaseModel):
    """The name of a preset, and settings of its decoding."""

    model_config = {"extra": "allow"}
    name: Text


class GenerationTable(Table):
    """The defaults of the trained pipeline."""

    sampling: dict[str, Any] = {}
    decoding: DecodingTable

    def give(self, pipe: ARPipeline) -> None:
        """Make them the defaults of `pipe`."""
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


class TokenRecipe(Table):
    """A recipe for `arimage train model`.

    Attributes:
        pipeline: the name of the pipeline's class.
        model: the arguments of its transformer, without those that follow from the tokens and their captions.
        text_encoder: a text encoder that is trained too: its shape, or the trained model that it is taken from. With a
            trained model to start from, that model's is trained further. None: that of the model of the tokens as it
            is.
        training: the fields of `TokenSettings` other than the optimizer.
        generation: the defaults of the trained pipeline.
    """

    says: ClassVar = "pipeline"

    pipeline: Text
    model: dict[str, Any] = {}
    text_encoder: TextEncoderTable | None = None
    optimizer: OptimizerSettings
    training: dict[str, Any] = {}
    generation: GenerationTable | None = None

    @field_validator("pipeline")
    @classmethod
    def check_pipeline(cls, name: str) -> str:
        if name not in PIPELINES:
            raise ValueError(f"pipeline is {name!r}: give one of {', '.join(PIPELINES)}")
        return name


class TokenizerRecipe(Table):
    """A recipe for `arimage train tokenizer`.

    Attributes:
        tokenizer: the name of its class.
        image_size: pixels along each side of the images.
        start_from: a trained tokenizer whose weights are taken, see `take_over`.
        optimizer: how it is trained; a `PatchVQModel` has no network to train.
        training: the fields of `TokenizerSettings` or `PatchSettings` other than the optimizer.
        augmentation: how copies of an image differ that `arimage train tokens` encodes.
    """

    says: ClassVar = "tokenizer"

    tokenizer: Literal["LlamaGenVQModel", "VARVQModel", "PatchVQModel"]
    image_size: Annotated[int, Field(strict=True, ge=8, le=2**11)]
    start_from: Text | None = None
    model: dict[str, Any] = {}
    optimizer: OptimizerSettings | None = None
    training: dict[str, Any] = {}
    augmentation: Augmentation | None = None

    @model_validator(mode="after")
    def check_optimizer(self) -> Self:
        needless = {"optimizer": self.optimizer, "start_from": self.start_from}
        if self.tokenizer == "PatchVQModel":
            for name in [name for name, value in needless.items() if value is not None]:
                raise ValueError(f"{name} is given, and a PatchVQModel has no network: leave it out")
        elif self.optimizer is None:
            raise ValueError("optimizer is missing: add it")
        return self


class PartRecipe(Table):
    """A recipe for `arimage train drafter`, `denoiser`, `refiner`, `student` or `upscaler`, as `part` says.

    Attributes:
        kind: of a drafter: of trees of tokens, for "eagle", or of windows, for the corrections of "sjd-coupled".
        model: the arguments of a refiner, an upscaler or a drafter of windows; the shape of others follows from the
            model.
    """

    says: ClassVar = "part"

    part: Literal["drafter", "denoiser", "refiner", "student", "upscaler"]
    kind: Literal["tree", "window"] = "tree"
    model: dict[str, Any] = {}
    optimizer: OptimizerSettings
    training: dict[str, Any] = {}

    @model_validator(mode="after")
    def check_shape(self) -> Self:
        if self.kind != "tree" and self.part != "drafter":
            raise ValueError(f"kind is {self.kind!r}, and this is a recipe for a {self.part}: leave it out")
        if self.model and self.part not in ("refiner", "upscaler") and self.kind != "window":
            raise ValueError(f"model is given, and the shape of a {self.part} follows from the model: leave it out")
        return self


Kind = TypeVar("Kind", TokenRecipe, TokenizerRecipe, PartRecipe)


def recipes(says: str, value: str | None = None) -> dict[str, Path]:
    """The recipes of this package and of installed models by their names: those with the setting `says`, of a `value`
    if one is given."""
    found = {path.stem: path for path in [*sorted(RECIPES.glob("*.toml")), *installed_files("recipes", "*.toml")]}
    said = {name: _content(path).get(says) for name, path in found.items()}
    return {name: found[name] for name, what in said.items() if isinstance(what, str) and value in (None, what)}


def _content(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML ({error}): correct the recipe") from error


def find_recipe(name_or_path: str | Path, known: dict[str, Path]) -> tuple[Path, dict[str, Any]]:
    """The file of a recipe by its path or its name, and what it holds."""
    path = Path(name_or_path)
    if not path.is_file():
        path = known.get(str(name_or_path), path)
    if not path.is_file():
        raise ValueError(
            not_installed(str(name_or_path))
            or f"unknown recipe {name_or_path}: give a TOML file or one of {', '.join(known)}"
        )
    return path, _content(path)


def load_recipe(
    name_or_path: str | Path, kind: type[Kind], value: str | None = None, *, steps: int | None = None
) -> Kind:
    """A recipe of a kind by its name, or of a TOML file.

    Args:
        value: what it must say that it trains.
        steps: of the training, in place of its own.

    Raises:
        ValueError: if there is none, or a setting is wrong.
    """
    path, content = find_recipe(name_or_path, recipes(kind.says))
    found, others = content.get(kind.says), ", ".join(recipes(kind.says, value))
    if not isinstance(found, str):
        raise ValueError(f"{path} does not say its {kind.says}: give another recipe, such as {others}")
    if value not in (None, found):
        raise ValueError(f"{path} is a recipe for a {found}: give another one, such as {others}")
    recipe = check(kind, content, path)
    if steps is not None:
        if recipe.optimizer is None:
            raise ValueError(f"--steps is {steps}, and {path} trains nothing step by step: leave it out")
        recipe.optimizer = check(OptimizerSettings, vars(recipe.optimizer) | {"steps": steps}, "--steps")
    return recipe


def load_augmentation(name_or_path: str | Path) -> Augmentation:
    """The table [augmentation] of a recipe, or of a file with no more than that."""
    path, content = find_recipe(name_or_path, recipes(TokenizerRecipe.says))
    if "augmentation" not in content:
        raise ValueError(f"{path} has no table [augmentation]: add it")
    return check(Augmentation, content["augmentation"], f"{path}: augmentation")


def settings_of(kind: Callable[..., Settings], recipe: Any, **given: Any) -> Settings:
    """The settings of a training by its recipe. The recipe cannot set the fields `given`."""
    where = "table [training]"
    if recipe.optimizer is not None:
        given = {"optimizer": recipe.optimizer, **given}
    for field in recipe.training.keys() & given.keys():
        raise ValueError(f"{where}: {field} is not a setting: leave it out")
    return check(kind, recipe.training | given, where)


def new_model(kind: Callable[..., Model], config: dict, name: str, **given) -> Model:
    """A model without memory for its weights, of the arguments `given` and those that the table `name` holds."""
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
