"""The console command `arimage-emoji`: how the lists of captions and the reference of the models are made."""

from pathlib import Path
from typing import Annotated

import typer

from arimage.cli import main as cli
from arimage.cli.options import Device, Dtype, check_models, choose_device, load_pipeline, panels
from arimage.pipelines.text.known import KNOWN_CAPTIONS
from arimage.training.commands import PACKAGED, Heldout, Out, Recipe, Train


app = typer.Typer(
    help="Make what comes with the models of emoji.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


@app.command("known")
@panels(pictures="data recipe", measurement="seeds needed limit batch_size dry_run", output="out")
def known(
    model: Annotated[
        str,
        typer.Argument(callback=check_models, help="Name or folder of a model with a list of captions."),
    ],
    data: Annotated[Path, typer.Option(help="The training set of the model: a parquet file.")],
    out: Out,
    recipe: Annotated[
        str | None, typer.Option(help="Recipe whose pictures are used. Default: the one of MODEL's name.")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="The most images per caption, with the seeds 0, 1, ...")
    ] = 4,
    needed: Annotated[int, typer.Option(min=1, help="How many of them must show the right picture.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Images generated at a time.")] = 32,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Measure only so many captions: names of pictures, then short ones.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how many images are missing, and how long they would take.")
    ] = False,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Measure which of its captions a model has learned: OUT/known_captions.json lists the others as not learned well.

    It is up to date at any time. Copy it into the folder of the model."""
    from arimage.training.recipe import load_recipe
    from arimage.training.tables import load_data, read_tables

    from .data.measure import run_known

    tables = read_tables(load_recipe(recipe or model, "transformer"))
    pictures = load_data(tables, "transformer", data)
    pipe = load_pipeline(model, device, dtype)
    settings = {"seeds": seeds, "needed": needed, "batch_size": batch_size, "limit": limit, "dry_run": dry_run}
    typer.echo(run_known(pipe, model, pictures, out, **settings))
    if not dry_run:
        typer.echo(out / KNOWN_CAPTIONS)


@app.command("classifier")
def classifier(data: Train, heldout: Heldout, out: Out, recipe: Recipe = PACKAGED, device: Device = None) -> None:
    """Train the classifier of `arimage eval score --metrics emoji-kid`; OUT/reference scores a model of the recipe."""
    from arimage.training.recipe import load_recipe
    from arimage.training.resuming import alone_in

    from .data.classifier import run_classifier

    tables = load_recipe(recipe, "tokenizer", "transformer")
    with alone_in(out):
        run_classifier(tables, data, heldout, out, choose_device(device))


def run() -> None:
    """Run the command, as `arimage` runs."""
    cli.run(app)
