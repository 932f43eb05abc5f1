"""The console commands `arimage train ...`. Heavy imports stay inside the commands, as in `arimage.cli.main`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..cli.options import (
    Device,
    Dtype,
    Model,
    Seed,
    check_decodings,
    check_output,
    choose_device,
    load_pipeline,
    panels,
    prompt_lines,
)
from ..settings.schema import Count, Items, Number, Pixels, Workers, check


train_app = typer.Typer(
    help="Train a model from a recipe. Run a command again to resume an interrupted run.", rich_markup_mode="markdown"
)

# The model, and the recipe of its name, that most commands here are for.
PACKAGED = "emoji-llamagen"
# The tables of a recipe that a finished model needs.
FINISHED = ("tokenizer", "transformer", "text_encoder", "generation")


def check_out(out: Path) -> Path:
    """The value of --out, after a check that it can be written, before the frameworks are imported."""
    check_output("--out", out, None)
    return out


Recipe = Annotated[str, typer.Option(help="Name of an installed model, or a TOML file.")]
Train = Annotated[Path, typer.Option("--data", help="Training set: a parquet file.")]
Heldout = Annotated[Path, typer.Option(help="Held-out set: a parquet file.")]
Out = Annotated[Path, typer.Option(callback=check_out, help="Folder of the run.")]
Images = Annotated[
    str,
    typer.Option(
        "--data",
        help="Training set, without captions: folder of images; folder or pattern of .parquet, .arrow or webdataset "
        ".tar files; or a data set of the Hugging Face Hub.",
    ),
]
HeldoutImages = Annotated[str, typer.Option("--heldout", help="Held-out set, as --data.")]
Split = Annotated[str, typer.Option(help='Split of --data, also a part as in "train[1000:]".')]
HeldoutSplit = Annotated[str, typer.Option(help='Split of --heldout, also a part as in "train[:1000]".')]
ImageColumn = Annotated[str | None, typer.Option("--image", help="Column of the images.")]
WorkerCount = Annotated[int, typer.Option("--workers", help="Processes that prepare batches.")]
PushToHub = Annotated[
    str | None,
    typer.Option(help="Repository of the Hugging Face Hub that gets what is trained, owner/name; it is made first."),
]
Compile = Annotated[bool, typer.Option(help="Compile the blocks; on a CPU this needs a C++ compiler.")]


@train_app.command("tokenizer")
def tokenizer(
    data: Images,
    heldout: HeldoutImages,
    out: Out,
    recipe: Recipe = PACKAGED,
    split: Split = "train",
    heldout_split: HeldoutSplit = "train",
    image: ImageColumn = None,
    workers: WorkerCount = 2,
    device: Device = None,
) -> None:
    """Train the image tokenizer of a recipe."""
    from .recipe import load_recipe
    from .resuming import alone_in
    from .tokenizers.reconstructions import held_out_psnr
    from .tokenizers.tokenizer import run_tokenizer

    check(Workers, workers, "--workers")
    options = {"split": split, "heldout_split": heldout_split, "image": image, "workers": workers}
    tables = load_recipe(recipe, "tokenizer")
    with alone_in(out):
        run_tokenizer(tables, data, heldout, out, choose_device(device), **options)
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

    Several processes train together: torchrun --nproc-per-node 2 --no-python arimage train transformer ...
    """
    from .processes import join_processes
    from .recipe import load_recipe, run_transformer
    from .resuming import alone_in

    join_processes()
    options = {"start_from": start_from, "unlearned": unlearned, "compile": compile}
    tables = load_recipe(recipe, *FINISHED)
    with alone_in(out):
        run_transformer(tables, data, heldout, out, choose_device(device), **options)


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
    from .resuming import alone_in

    parts = load_recipe(recipe, "transformer", "drafter"), load_pipeline(model, device, dtype)
    with alone_in(out):
        run_drafter(*parts, data, heldout, out)


@train_app.command("distill")
def distill(
    out: Out,
    prompts: Annotated[
        Path | None,
        typer.Option(help="File of prompts, .txt, .jsonl, ...; by default the classes or captions of the model."),
    ] = None,
    model: Model = PACKAGED,
    recipe: Recipe = PACKAGED,
    compile: Compile = False,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Train a student that turns noise into images in a few passes, for the decodings "few-step" and "flow"; OUT/model
    is the student with its teacher."""
    from .acceleration.distill import run_distill
    from .processes import join_processes
    from .recipe import load_recipe
    from .resuming import alone_in

    if prompts is not None and not prompts.is_file():
        raise ValueError(f"--prompts is {prompts}, which is not a file: give a file of prompts")
    join_processes()
    parts = load_recipe(recipe, "distill"), load_pipeline(model, device, dtype)
    with alone_in(out):
        run_distill(*parts, prompts, out, compile)


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
    from .resuming import alone_in

    parts = load_recipe(recipe, "transformer", "denoiser"), load_pipeline(model, device, dtype)
    with alone_in(out):
        run_denoiser(*parts, data, heldout, out)


@train_app.command("neighbours")
def neighbours(
    data: Images,
    out: Out,
    model: Model = PACKAGED,
    split: Split = "train",
    image: ImageColumn = None,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Fit a model of neighbours to a finished model, in minutes, for the setting "corrections" of "sjd-coupled";
    OUT/model is the model with it."""
    from .acceleration.neighbours import run_neighbours
    from .resuming import alone_in

    pipe = load_pipeline(model, device, dtype)
    with alone_in(out):
        run_neighbours(pipe, data, out, split=split, image=image)


@train_app.command("upscaler")
def upscaler(
    data: Images,
    heldout: HeldoutImages,
    out: Out,
    model: Model = PACKAGED,
    recipe: Recipe = PACKAGED,
    split: Split = "train",
    heldout_split: HeldoutSplit = "train",
    image: ImageColumn = None,
    workers: WorkerCount = 2,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Train an upscaler for the image tokenizer of a finished model, for images of twice as many pixels along each
    side from the same tokens; OUT/model is the model with its upscaler."""
    from .recipe import load_recipe
    from .resuming import alone_in
    from .tokenizers.upscaler import run_upscaler

    check(Workers, workers, "--workers")
    options = {"split": split, "heldout_split": heldout_split, "image": image, "workers": workers}
    parts = load_recipe(recipe, "upscaler"), load_pipeline(model, device, dtype)
    with alone_in(out):
        run_upscaler(*parts, data, heldout, out, **options)


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
    from .resuming import alone_in

    parts = load_recipe(recipe, "transformer", "collaborate"), load_pipeline(model, device, dtype)
    with alone_in(out):
        run_collaborate(*parts, data, heldout, out)


@train_app.command("lora")
@panels(
    pictures="data caption prior prior_prompts prior_share",
    adapter="rank alpha targets",
    training="steps learning_rate batch_size caption_dropout short_share seed",
    reports="out validation_prompts decoding report_every push_to_hub",
)
def lora(
    data: Annotated[
        Path,
        typer.Option(
            help="Pictures with captions: a folder with metadata.jsonl (file_name, text) or with NAME.txt next to "
            "each picture, or a parquet file with image, and caption or text. For a model of classes, captions are "
            "their names or ids."
        ),
    ],
    out: Out,
    model: Model = PACKAGED,
    rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 16,
    alpha: Annotated[float, typer.Option(help="The adapter is scaled by alpha / rank.")] = 16.0,
    targets: Annotated[
        Literal["attention", "all"], typer.Option(help="The attention, or all linear layers of the decoder.")
    ] = "attention",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 500,
    learning_rate: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 1e-4,
    batch_size: Annotated[int, typer.Option(help="Pictures per step.")] = 8,
    caption: Annotated[
        str | None,
        typer.Option(help='Caption template, e.g. "{} in blue ink". {} is replaced by the caption of each image.'),
    ] = None,
    caption_dropout: Annotated[float, typer.Option(help="Share of pictures learned without a caption.")] = 0.1,
    prior: Annotated[
        Path | None,
        typer.Option(help="Pictures with captions that the model should keep, in the same layouts as --data."),
    ] = None,
    prior_prompts: Annotated[
        str | None,
        typer.Option(
            help="Prompts of pictures that the model should keep, a file as in `arimage eval generate`: it makes them "
            "itself before training."
        ),
    ] = None,
    prior_share: Annotated[float, typer.Option(help="Share of old pictures in every batch.")] = 0.5,
    short_share: Annotated[
        float, typer.Option(help="Share of steps on the first 96 tokens only, with more pictures, in raster order.")
    ] = 0.5,
    validation_prompts: Annotated[
        Path | None, typer.Option(help="Text file with one prompt per line, for samples.png.")
    ] = None,
    decoding: Annotated[
        str | None, typer.Option(callback=check_decodings, help="Decoding of samples.png. Default: the model's.")
    ] = None,
    report_every: Annotated[float, typer.Option(help="Seconds between reports.")] = 300.0,
    push_to_hub: PushToHub = None,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Train a LoRA adapter for a finished model; OUT/best has the lowest held-out loss, OUT/last is the last one, and
    OUT/samples.png shows the base and the adapter at the scales 0.5 and 1."""
    from .adapters.lora import LoraSettings, LoraTask, check_lora, train_lora, warning_of_poor_pictures
    from .adapters.pairs import load_pairs
    from .resuming import alone_in
    from .uploading import check_repository, make_repository, upload

    if push_to_hub is not None:
        check_repository(push_to_hub)
    if prior is not None and prior_prompts is not None:
        raise ValueError("--prior and --prior-prompts both name old pictures: give one of the two")
    settings = LoraSettings(
        rank, alpha, targets, steps, learning_rate, batch_size, caption_dropout, prior_share, short_share, seed
    )
    check(Number, report_every, "--report-every")
    prompts = [] if validation_prompts is None else prompt_lines("--validation-prompts", validation_prompts)
    pipe = load_pipeline(model, device, dtype, videos=True, continues=True)
    if pipe.abilities.generates_video:
        raise ValueError(
            f"{model} generates videos, and this command takes pictures: use `arimage train tokens`, then `arimage "
            "train model --start-from ... --lora-rank 16`"
        )
    size = pipe.image_sizes[0]
    pictures = load_pairs(data, size, caption)
    old = None if prior is None else load_pairs(prior, size)
    with alone_in(out):
        if prior_prompts is not None:
            from ..eval.runs.prompts import prompt_file, read_prompts
            from .adapters.generated import generate_prior

            asked = [row["prompt"] for row in read_prompts(prompt_file(prior_prompts))]
            old = generate_prior(pipe, asked, out / "prior.safetensors", seed=seed, decoding=decoding)
        parts = {"base": model, "prior": old, "prompts": prompts, "decoding": decoding}
        task = LoraTask(pipe, pictures, settings, **parts)
        check_lora(task, out)
        if push_to_hub is not None:
            make_repository(push_to_hub)
        psnr, own = task.report_reconstructions(out)
        typer.echo(
            f"the image tokenizer reproduces these pictures at {psnr:.1f} dB"
            + ("" if own is None else f", prior ones at {own:.1f} dB")
        )
        if warning := warning_of_poor_pictures(psnr, own):
            typer.echo(f"warning: {warning}", err=True)
        train_lora(task, out, report_every)
    if push_to_hub is not None:
        upload(push_to_hub, out / "best")
    typer.echo(f"{out / 'best'}: held-out loss {task.best[0]:.4f} at step {int(task.best[1])}")


@train_app.command("tokens")
@panels(
    data="split image_column caption_column label_column classes limit",
    tokens="model size views augmentation shard_size out",
)
def tokens(
    data: Annotated[
        str,
        typer.Option(
            help="Folder with one folder of images per class, or with images, or videos, and a metadata.jsonl or a "
            "NAME.txt next to each; folder or pattern of .parquet, .arrow or webdataset .tar files; or a data set of "
            "the Hugging Face Hub."
        ),
    ],
    out: Annotated[Path, typer.Option(callback=check_out, help="Folder of the tokens.")],
    model: Annotated[
        str,
        typer.Option(
            help="Model whose image tokenizer encodes: a name or a folder, or the folder of a trained tokenizer."
        ),
    ] = PACKAGED,
    size: Annotated[int | None, typer.Option(help="Side of a square in pixels. Default: the model's size.")] = None,
    views: Annotated[
        Literal["centre", "centre-flip", "ten-crop"],
        typer.Option(help="The middle of an image, also mirrored, or ten crops, as LlamaGen takes them."),
    ] = "centre",
    augmentation: Annotated[
        str | None,
        typer.Option(
            help="Recipe whose table [augmentation] says how further copies of an image differ: the name of an "
            "installed one, or a TOML file. Not for held-out images."
        ),
    ] = None,
    split: Annotated[
        str,
        typer.Option(
            help="Split of a data set of the Hub, of shards that are named after splits, or of a folder with folders "
            "such as train and val."
        ),
    ] = "train",
    image_column: Annotated[
        str | None, typer.Option("--image", "--video", help="Column of the images or videos.")
    ] = None,
    caption_column: Annotated[str | None, typer.Option("--caption", help="Column of the captions.")] = None,
    label_column: Annotated[str | None, typer.Option("--label", help="Column of the classes.")] = None,
    classes: Annotated[Path | None, typer.Option(help="File with the name of each class on a line.")] = None,
    limit: Annotated[int | None, typer.Option(help="Read at most this many images or videos.")] = None,
    shard_size: Annotated[int, typer.Option(help="Images or videos per file.")] = 1024,
    batch_size: Annotated[int, typer.Option(help="Images, or frames of videos, that are encoded at a time.")] = 32,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Encode the images or videos of a data set once, for `arimage train model`. Run it again to go on."""
    from .losses import reads_text
    from .recipe import load_recipe
    from .tables import read_tables
    from .tokens.cache import encode_tokens
    from .tokens.encoders import load_encoder
    from .tokens.sources import open_source

    check(Items | None, limit, "--limit")
    for name, value in (("--shard-size", shard_size), ("--batch-size", batch_size)):
        check(Count, value, name)
    changes = None
    if augmentation is not None:
        if views != "centre":
            raise ValueError(f"--views is {views}, and --augmentation says which copies are encoded: leave out one")
        changes = read_tables(load_recipe(augmentation, "augmentation")).augmentation
    names = None if classes is None else prompt_lines("--classes", classes, "names of classes")
    columns = {"image": image_column, "caption": caption_column, "label": label_column}
    chosen = choose_device(device)
    load = partial(load_pipeline, device=chosen, dtype=dtype, videos=True, continues=True)
    pipe = load_encoder(model, load, dtype).to(chosen)
    kind = {"videos": pipe.abilities.generates_video, "captions": reads_text(pipe)}
    source = open_source(data, split=split, classes=names, **kind, **columns)
    index = encode_tokens(
        source,
        pipe,
        out,
        model=model,
        size=check(Pixels | None, size, "--size"),
        views=views,
        augmentation=changes,
        shard_size=shard_size,
        batch_size=batch_size,
        limit=limit,
    )
    images = sum(shard.count for shard in index.shards)
    of = f", {index.num_classes} classes" if index.labelled else ""
    what = "videos" if kind["videos"] else "images"
    short = f", {index.rows - images} were too short" if index.rows > images else ""
    left = f", {source.left_out} files of {data} were left out" if source.left_out else ""
    typer.echo(f"{out}: {images} {what}{of}, {index.shape[0]} tokens each, in {len(index.shards)} files{short}{left}")


@train_app.command("model")
@panels(
    data="tokens heldout",
    training="recipe text_tokenizer start_from steps learning_rate batch_size lora_rank lora_targets workers compile",
    reports="out report_every log_with push_to_hub dry_run",
)
def train_model(
    tokens: Annotated[Path, typer.Option(help="Folder of `arimage train tokens`.")],
    out: Out,
    recipe: Annotated[str, typer.Option(help="Name of a recipe, or a TOML file.")],
    heldout: Annotated[
        list[Path] | None,
        typer.Option(
            help="The same for held-out images; several are reported by the names of their folders. Default: a tenth "
            "of --tokens, at most 512."
        ),
    ] = None,
    text_tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the tokenizer of a new text encoder. Default: one that is learned from the captions."
        ),
    ] = None,
    start_from: Annotated[
        str | None,
        typer.Option(help="Trained model to begin with, a name or a folder. Default: random weights."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps. Default: the recipe's.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="Highest learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images or videos per process and step.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train an adapter of this rank, not the whole model.")] = None,
    lora_targets: Annotated[
        Literal["attention", "all"] | None, typer.Option(help="What an adapter changes: the attention, or all.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that prepare batches.")] = None,
    report_every: Annotated[float, typer.Option(help="Seconds between reports.")] = 900.0,
    log_with: Annotated[
        str | None, typer.Option(help="Tracker that gets the figures too, of accelerate: tensorboard, wandb, ...")
    ] = None,
    push_to_hub: PushToHub = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the training needs, and do not begin.")
    ] = False,
    compile: Compile = False,
    device: Device = None,
) -> None:
    """Train a model of images or videos on tokens, from random weights or from a trained model; OUT/model is the
    pipeline, OUT/adapter an adapter.

    Several processes train together: torchrun --nproc-per-node 2 --no-python arimage train model ...
    """
    from .processes import join_processes, processes
    from .resuming import alone_in
    from .tokens.cache import TokenCache
    from .tokens.recipe import begin_training, load_token_recipe, plan_of, token_settings
    from .uploading import check_repository, make_repository, upload

    if push_to_hub is not None:
        check_repository(push_to_hub)
    table = load_token_recipe(recipe)
    check(Number, report_every, "--report-every")
    given = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "workers": workers}
    settings = token_settings(table, **given, lora_rank=lora_rank, lora_targets=lora_targets)
    if dry_run:
        plan = plan_of(table, settings, TokenCache(tokens), start_from, text_tokenizer)
        for name, value in plan.items():
            typer.echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value:.2f}")
        return
    join_processes()
    with alone_in(out):
        more = {"text_tokenizer": text_tokenizer, "compile": compile}
        task = begin_training(table, settings, tokens, heldout or (), start_from, choose_device(device), **more)
        first = processes()[0] == 0
        if first:
            typer.echo(task.held_out, err=True)
        if first and push_to_hub is not None:
            make_repository(push_to_hub)
        task.fit(out, report_every, log_with)
    trained = out / ("adapter" if settings.lora_rank else "model")
    if not first:
        return
    if settings.best is not None:
        typer.echo(f"{out / 'best'}: lowest loss of {settings.best}, at step {int(task.lowest[1])}")
    if push_to_hub is not None:
        upload(push_to_hub, trained if settings.best is None else out / "best")
    typer.echo(trained)


@train_app.command("all")
def train_all(data: Train, heldout: Heldout, out: Out, recipe: Recipe = PACKAGED, device: Device = None) -> None:
    """Train the tokenizer, then the transformer, as for an installed model; the pipeline is OUT/model."""
    from .recipe import load_recipe
    from .resuming import alone_in

    load_recipe(recipe, *FINISHED)
    with alone_in(out):
        tokenizer(str(data), str(heldout), out, recipe, device=device)
        transformer(data, heldout, out, recipe, device)
