"""The console commands `arimage train ...`. Heavy imports stay inside the commands, as in `arimage.cli`."""

from pathlib import Path
from typing import Annotated

import typer

from ..options import Device, Dtype, Model, choose_device, load_pipeline


train_app = typer.Typer(
    help="Train a model from a recipe. Run a command again to resume an interrupted run.", rich_markup_mode="markdown"
)

# The model, and the recipe of its name, that most commands here are for.
PACKAGED = "emoji-llamagen"
# The tables of a recipe that a finished model needs.
FINISHED = ("tokenizer", "transformer", "text_encoder", "generation")
Recipe = Annotated[str, typer.Option(help="Name of a packaged model, or a TOML file.")]
Train = Annotated[Path, typer.Option("--data", help="Training set: a parquet file.")]
Heldout = Annotated[Path, typer.Option(help="Held-out set: a parquet file.")]
Out = Annotated[Path, typer.Option(help="Folder of the run.")]


@train_app.command("tokenizer")
def tokenizer(
    data: Annotated[Path, typer.Option(help="Training set: a parquet file or a folder of images.")],
    heldout: Annotated[Path, typer.Option(help="Held-out set: a parquet file or a folder of images.")],
    out: Out,
    recipe: Recipe = PACKAGED,
    device: Device = None,
) -> None:
    """Train the image tokenizer of a recipe."""
    from .recipe import load_recipe
    from .tokenizer import run_tokenizer

    run_tokenizer(load_recipe(recipe, "tokenizer"), data, heldout, out, choose_device(device))


@train_app.command("transformer")
def transformer(
    data: Train,
    heldout: Heldout,
    out: Out,
    recipe: Recipe = PACKAGED,
    device: Device = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            help="Trained model to begin with: a name or a folder; its image tokenizer must be that of --out."
        ),
    ] = None,
    compile: Annotated[bool, typer.Option(help="Compile the blocks; on a CPU this needs a C++ compiler.")] = False,
) -> None:
    """Train the transformer of a recipe, and the refiner of a VAR; --out must hold the trained tokenizer.

    Several processes train together: torchrun --nproc-per-node 2 --no-python arimage train transformer ...
    """
    from .processes import join_processes
    from .recipe import load_recipe, run_transformer

    join_processes()
    beginning = {"start_from": start_from, "compile": compile}
    run_transformer(load_recipe(recipe, *FINISHED), data, heldout, out, choose_device(device), **beginning)


@train_app.command("drafter")
def drafter(
    data: Train,
    heldout: Heldout,
    out: Out,
    model: Model = PACKAGED,
    recipe: Recipe = PACKAGED,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Train a drafter for a finished model, for the decoding "eagle"; OUT/model is the model with its drafter."""
    from .acceleration.drafter import run_drafter
    from .recipe import load_recipe

    run_drafter(load_recipe(recipe, "transformer", "drafter"), load_pipeline(model, device, dtype), data, heldout, out)


@train_app.command("distill")
def distill(
    out: Out,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, .txt, .jsonl, ...; by default the classes or captions of the model."),
    ] = None,
    model: Model = PACKAGED,
    recipe: Recipe = PACKAGED,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Train a student that turns noise into images in a few passes, for the decodings "few-step" and "flow"; OUT/model
    is the student with its teacher."""
    from .acceleration.distill import run_distill
    from .recipe import load_recipe

    if prompts is not None and not prompts.is_file():
        raise ValueError(f"--prompts is {prompts}, which is not a file: give a file of prompts")
    run_distill(load_recipe(recipe, "distill"), load_pipeline(model, device, dtype), prompts, out)


@train_app.command("denoiser")
def denoiser(
    data: Train,
    heldout: Heldout,
    out: Out,
    model: Model = PACKAGED,
    recipe: Recipe = PACKAGED,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Train a denoiser for a finished model, for the decoding "sjd2"; OUT/model is the model with its denoiser."""
    from .acceleration.denoiser import run_denoiser
    from .recipe import load_recipe

    parts = load_recipe(recipe, "transformer", "denoiser"), load_pipeline(model, device, dtype)
    run_denoiser(*parts, data, heldout, out)


@train_app.command("collaborate")
def collaborate(
    data: Train,
    heldout: Heldout,
    out: Out,
    model: Model = "emoji-var",
    recipe: Recipe = "emoji-var",
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Fine-tune a large and a small VAR transformer, each for its scales of the decoding "code"; OUT/model is the
    pair."""
    from .acceleration.collaborate import run_collaborate
    from .recipe import load_recipe

    run_collaborate(
        load_recipe(recipe, "transformer", "collaborate"), load_pipeline(model, device, dtype), data, heldout, out
    )


@train_app.command("classifier")
def classifier(data: Train, heldout: Heldout, out: Out, recipe: Recipe = PACKAGED, device: Device = None) -> None:
    """Train the classifier of `arimage eval score --metrics emoji-kid`; OUT/reference scores a model of the recipe."""
    from .classifier import run_classifier
    from .recipe import load_recipe

    run_classifier(load_recipe(recipe, "tokenizer", "transformer"), data, heldout, out, choose_device(device))


@train_app.command("all")
def train_all(data: Train, heldout: Heldout, out: Out, recipe: Recipe = PACKAGED, device: Device = None) -> None:
    """Train the tokenizer, then the transformer, as for a packaged model; the pipeline is OUT/model."""
    from .recipe import load_recipe

    load_recipe(recipe, *FINISHED)
    tokenizer(data, heldout, out, recipe, device)
    transformer(data, heldout, out, recipe, device)
