"""Recipes of emoji: a TOML file says how a model was trained, with all its parts. This module reads it and joins what
it asks for."""

from pathlib import Path

from arimage.decoding.contract.supports import missing
from arimage.pipelines.base import ARPipeline
from arimage.pipelines.text.known import KNOWN_CAPTIONS, load_known
from arimage.tokenizers.vq_patches import PatchVQModel
from arimage.training.recipe import find_recipe
from arimage.training.saving import save_float16
from arimage.training.tokenizers.tokenizer import fit_tokenizer, new_tokenizer

from .. import RECIPES
from ..data.animation import known_clips
from ..known import KnownCaptions
from .beginning import Beginning, Run
from .captions import CaptionTask
from .clips import frames_of
from .collect import known_scenes
from .tables import Recipe, load_both, load_clips, read_tables, settings_of, with_scenes
from .text import TextSettings
from .transformers.arpg import ARPGTask
from .transformers.cosmos import VideoTask
from .transformers.latent_llama import LatentLlamaTask
from .transformers.llamagen import TransformerTask
from .transformers.var import VARTransformerTask


# How many times as often as others a picture is sampled whose name a model has not learned.
UNLEARNED = 4.0
# By the class of the transformer.
TASKS = {
    "LlamaGenTransformer": TransformerTask,
    "ARPGTransformer": ARPGTask,
    "LatentLlamaTransformer": LatentLlamaTask,
    "VARTransformer": VARTransformerTask,
    "CosmosTransformer": VideoTask,
}


def whole_recipes() -> dict[str, Path]:
    """The recipes of whole models, by their names."""
    return {path.stem: path for path in sorted(RECIPES.glob("*.toml")) if "[transformer." in path.read_text("utf-8")}


def load_recipe(name_or_path: str | Path, *parts: str) -> dict:
    """The recipe of an installed model by its name, or of a TOML file.

    Args:
        parts: names of tables that it must have.

    Raises:
        ValueError: if the recipe does not exist, a part is missing, or a setting is wrong.
    """
    path, recipe = find_recipe(name_or_path, whole_recipes())
    tables = read_tables(recipe, path)
    try:
        for part in parts:
            tables.table(part)
        check_recipe(tables)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return recipe


def check_recipe(recipe: Recipe) -> None:
    """Check a whole recipe: its settings, and that its models can be built and sampled, without memory for weights.

    Raises:
        ValueError: if a setting is wrong, or two do not fit each other.
    """
    if recipe.text_training is not None:
        settings_of(TextSettings, recipe.text_training, "text_training")
    if recipe.tokenizer is None:
        return
    vq = new_tokenizer(recipe.image_tokenizer)
    if recipe.transformer is not None:
        if isinstance(vq, PatchVQModel):
            raise ValueError(
                "table [transformer]: the tokens of a PatchVQModel are trained by `arimage train tokens` and `arimage "
                "train model`: leave it out"
            )
        pipe, generation = task_of(recipe).trial(recipe, vq), recipe.table("generation")
        generation.give(pipe)
        lacking = missing(pipe.decoding.needs, pipe.traits)
        if lacking is not None:
            raise ValueError(
                f"table [generation.decoding]: name is {generation.decoding.name}, which does not fit the model: "
                f"{lacking}"
            )


def task_of(recipe: Recipe) -> type[CaptionTask]:
    """The task that trains the transformer of a recipe."""
    chosen = recipe.table("transformer").kind
    name = chosen or "LlamaGenTransformer"
    if recipe.clips is not None:
        name = "CosmosTransformer"
    elif recipe.table("tokenizer").kind == "VARVQModel":
        name = "VARTransformer"
    if chosen not in (None, name):
        raise ValueError(f"table [transformer]: class is {chosen}, and the recipe is one for a {name}: leave it out")
    return TASKS[name]


def run_tokenizer(recipe: dict, train: str | Path, heldout: str | Path, out: Path, device: str) -> None:
    """Train the tokenizer of a recipe, and save it in `out`/tokenizer/tokenizer.

    Raises:
        ValueError: if a setting or the data do not fit.
    """
    tables = read_tables(recipe)
    table = tables.image_tokenizer
    new_tokenizer(table)
    if tables.clips is not None:
        data, heldout_data = map(frames_of, load_clips(tables, "tokenizer", train, heldout))
    else:
        data, heldout_data = load_both(tables, "tokenizer", train, heldout)
        data = with_scenes(tables, "tokenizer", data)
    fit_tokenizer(table, data, heldout_data, out, device)


def run_transformer(
    recipe: dict,
    train: str | Path,
    heldout: str | Path,
    out: str | Path,
    device: str,
    *,
    start_from: str | Path | None = None,
    unlearned: Path | None = None,
    compile: bool = False,
) -> ARPipeline:
    """Train the transformer of a recipe, and the refiner of a VAR, with the tokenizer in `out`. The pipeline is saved
    in `out`/model, in float16.

    Every report saves the model again, so that an interrupted run leaves its latest. `start_from` and `compile` are
    those of `Beginning`. `unlearned` is a folder that holds a list of captions: pictures whose name is not learned
    are sampled `UNLEARNED` times as often. A table `text_training` says how a fresh text encoder is trained first.

    Raises:
        ValueError: if a setting or the data do not fit, `out` has no trained tokenizer, or `unlearned` no list of the
            captions of a model of images.
    """
    tables, out = read_tables(recipe), Path(out)
    check_recipe(tables)
    task, folder = task_of(tables), out / "tokenizer" / "tokenizer"
    if not folder.is_dir():
        raise ValueError(
            f"{out} has no trained tokenizer: run `arimage-emoji train tokenizer` with the same --out first"
        )
    if start_from is not None and Path(start_from).resolve() == (out / "model").resolve():
        raise ValueError(f"--start-from is {start_from}, which this run replaces: give another --out")
    more = set() if unlearned is None else _names_not_learned(unlearned)
    if tables.clips is not None:
        if unlearned is not None:
            raise ValueError("--unlearned is for models of images, and the recipe is one of videos: leave it out")
        data, heldout_data = load_clips(tables, "transformer", train, heldout)
        known = known_clips(data)
    else:
        plain, heldout_data = load_both(tables, "transformer", train, heldout)
        plain = plain.more_often(more, UNLEARNED)
        data = with_scenes(tables, "transformer", plain)
        framed = tables.table("transformer").training.get("framed_share", 0) > 0
        known = known_scenes(plain, data, framed=framed)

    def save(pipe: ARPipeline) -> None:
        tables.table("generation").give(pipe)
        pipe.known_captions = known
        save_float16(pipe, out / "model")

    text = tables.text_training
    text_settings = None if text is None else settings_of(TextSettings, text, "text_training")
    beginning = Beginning(start_from, text_settings, compile)
    pipe = task.run(Run(tables, folder, data, heldout_data, out, device, save, beginning))
    save(pipe)
    return pipe


def _names_not_learned(folder: Path) -> set[str]:
    known = load_known(folder)
    if not isinstance(known, KnownCaptions):
        raise ValueError(f"{folder} has no {KNOWN_CAPTIONS}: give the folder of a list that says what is not learned")
    return {name for name, captions in known.unlearned.items() if name in captions}
