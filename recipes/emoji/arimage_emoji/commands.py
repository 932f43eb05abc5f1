"""The console command `arimage-emoji`: how the models of emoji, their captions and their reference are made."""

from pathlib import Path
from typing import Annotated

import typer

from arimage.cli import main as cli
from arimage.cli.options import Device, Dtype, check_models, choose_device, load_pipeline, panels
from arimage.pipelines.text.known import KNOWN_CAPTIONS
from arimage.training.commands import Compile, Out


app = typer.Typer(
    help="Train the models of emoji, and make what comes with them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


train_app = typer.Typer(
    help="Train a model by one of its recipes. Run a command again to resume an interrupted run.",
    rich_markup_mode="markdown",
)
app.add_typer(train_app, name="train")

Recipe = Annotated[str, typer.Option(help="Name of a model of this package, or a TOML file.")]
Train = Annotated[Path, typer.Option("--data", help="Training set: a parquet file.")]
Heldout = Annotated[Path, typer.Option(help="Held-out set: a parquet file.")]
PACKAGED = "emoji-llamagen"
# The tables of a recipe that a finished model needs.
FINISHED = ("tokenizer", "transformer", "text_encoder", "generation")


@train_app.command("tokenizer")
def tokenizer(data: Train, heldout: Heldout, out: Out, recipe: Recipe = PACKAGED, device: Device = None) -> None:
    """Train the image tokenizer of a recipe."""
    from arimage.training.resuming import alone_in
    from arimage.training.tokenizers.reconstructions import held_out_psnr

    from .training.recipe import load_recipe, run_tokenizer

    tables = load_recipe(recipe, "tokenizer")
    with alone_in(out):
        run_tokenizer(tables, data, heldout, out, choose_device(device))
        psnr = held_out_psnr(out / "tokenizer")
    typer.echo(f"{out / 'tokenizer' / 'tokenizer'}: {psnr:.2f} dB")


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
    unlearned: Annotated[
        Path | None,
        typer.Option(
            help="Folder with a known_captions.json: pictures whose name is not learned are sampled 4 times as often."
        ),
    ] = None,
    compile: Compile = False,
) -> None:
    """Train the transformer of a recipe, and the refiner of a VAR; --out must hold the trained tokenizer.

    Several processes train together: torchrun --nproc-per-node 2 --no-python arimage-emoji train transformer ...
    """
    from arimage.training.processes import join_processes
    from arimage.training.resuming import alone_in

    from .training.recipe import load_recipe, run_transformer

    join_processes()
    options = {"start_from": start_from, "unlearned": unlearned, "compile": compile}
    tables = load_recipe(recipe, *FINISHED)
    with alone_in(out):
        run_transformer(tables, data, heldout, out, choose_device(device), **options)


@train_app.command("all")
def train_all(data: Train, heldout: Heldout, out: Out, recipe: Recipe = PACKAGED, device: Device = None) -> None:
    """Train the tokenizer, then the transformer, as for the model of the recipe; the pipeline is OUT/model."""
    from arimage.training.resuming import alone_in

    from .training.recipe import load_recipe

    load_recipe(recipe, *FINISHED)
    with alone_in(out):
        tokenizer(data, heldout, out, recipe, device)
        transformer(data, heldout, out, recipe, device)


@app.command("pictures")
def pictures(
    data: Train,
    out: Annotated[Path, typer.Option(help="Parquet file with the columns image and captions.")],
    recipe: Recipe = PACKAGED,
    scale: Annotated[int, typer.Option(min=1, max=8, help="How many times as large as the recipe's.")] = 1,
    scenes: Annotated[bool, typer.Option("--scenes", help="Also those that the recipe makes of them.")] = False,
) -> None:
    """Write the pictures of a recipe as an ordinary data set, for the commands of `arimage train`."""
    from .training.captioned import write_pictures
    from .training.recipe import load_recipe
    from .training.tables import load_data, read_tables, with_scenes

    tables = read_tables(load_recipe(recipe, "transformer"))
    found = load_data(tables, "transformer", data, scale)
    found = with_scenes(tables, "transformer", found) if scenes else found
    write_pictures(found, out)
    typer.echo(f"{out}: {len(found)} pictures")


@app.command("known")
@panels(pictures="data recipe", measurement="seeds needed limit batch_size dry_run", output="out")
def known(
    model: Annotated[
        str, typer.Argument(callback=check_models, help="Name or folder of a model with a list of captions.")
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
    from .data.measure import run_known
    from .training.recipe import load_recipe
    from .training.tables import load_data, read_tables

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
    from arimage.training.resuming import alone_in

    from .data.classifier import run_classifier
    from .training.recipe import load_recipe

    tables = load_recipe(recipe, "tokenizer", "transformer")
    with alone_in(out):
        run_classifier(tables, data, heldout, out, choose_device(device))


def run() -> None:
    """Run the command, as `arimage` runs."""
    cli.run(app)
