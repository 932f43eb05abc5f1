"""The console commands `arimage train ...`. Heavy imports stay inside the commands, as in `arimage.cli.main`."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..cli.options import (
    ENCODER_HELP,
    Device,
    Dtype,
    Model,
    Seed,
    check_decodings,
    check_models,
    choose_device,
    load_pipeline,
    output,
    panels,
    prompt_lines,
)
from ..settings.schema import Count, Items, Number, Pixels, Positive, Workers, check


train_app = typer.Typer(
    help="Train a model from a recipe. Run a command again to resume an interrupted run.", rich_markup_mode="markdown"
)

PACKAGED = "emoji-llamagen"
# The panel of what is trained for a finished model.
PARTS = "Parts of a finished model, which make it faster or its images larger"


DATA = (
    "Folder with images and a metadata.jsonl or .csv (file_name, text) or a NAME.txt next to each, or with a folder "
    "per class; folder or pattern of .parquet, .arrow or webdataset .tar files; or a data set of the Hugging Face Hub."
)
Recipe = Annotated[str, typer.Option(help="Name of a recipe, or a TOML file.")]
TrainingSteps = Annotated[int | None, typer.Option("--steps", help="Training steps. Default: the recipe's.")]
Tokens = Annotated[Path, typer.Option(help="Folder of `arimage train tokens`.")]
Out = Annotated[Path, output("Folder of the run.")]
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
HubToken = Annotated[
    str | None, typer.Option(help="Token for --push-to-hub. Default: HF_TOKEN, or that of `hf auth login`.")
]
Private = Annotated[bool, typer.Option("--private", help="Make the repository of --push-to-hub a private one.")]
MaxGradNorm = Annotated[float | None, typer.Option(help="Longer gradients are shortened to this norm.")]
Accumulation = Annotated[int | None, typer.Option("--gradient-accumulation", help="Batches per step.")]
CheckpointEvery = Annotated[
    int | None, typer.Option(help="Keep a checkpoint of every so many steps, next to the newest one.")
]
CheckpointsTotalLimit = Annotated[int | None, typer.Option(help="Keep at most this many of them, the newest.")]
ResumeFrom = Annotated[
    str | None, typer.Option(help="Kept checkpoint to resume from, as in checkpoint-1000. Default: the newest one.")
]
Compile = Annotated[bool, typer.Option(help="Compile the blocks; on a CPU this needs a C++ compiler.")]


def check_kept(every: int | None, most: int | None, resume_from: str | None) -> dict:
    """What the options of checkpoints are for `fit`."""
    check(Count | None, every, "--checkpoint-every")
    check(Count | None, most, "--checkpoints-total-limit")
    if most is not None and every is None:
        raise ValueError("--checkpoints-total-limit is given, and none are kept: give --checkpoint-every too")
    return {"checkpoint_every": every, "checkpoints_total_limit": most, "resume_from": resume_from}


def check_base(option: str, model: str | None, out: Path) -> None:
    """Refuse to replace the model that a training begins with by what it trains."""
    if model is not None and Path(model).resolve() in [(out / name).resolve() for name in ("model", "best")]:
        raise ValueError(f"{option} is {model}, which what is trained would replace: give another --out")


@train_app.command("tokens")
@panels(
    data="split image_column caption_column label_column classes limit",
    tokens="model size views augmentation shard_size out",
)
def tokens(
    data: Annotated[str, typer.Option(help=f"{DATA} Or of videos, for a model of videos.")],
    out: Annotated[Path, output("Folder of the tokens.")],
    model: Annotated[str, typer.Option(help=ENCODER_HELP)] = PACKAGED,
    size: Annotated[int | None, typer.Option(help="Side of a square in pixels. Default: the model's size.")] = None,
    views: Annotated[
        Literal["centre", "centre-flip", "ten-crop"],
        typer.Option(help="The middle of an image, also mirrored, or ten crops, as LlamaGen takes them."),
    ] = "centre",
    augmentation: Annotated[
        str | None,
        typer.Option(
            help="Recipe whose table [augmentation] says how further copies of an image differ: a name, or a TOML "
            "file. Not for held-out images."
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
    """Encode the images or videos of a data set once, for `arimage train model`. Needs a data set and the model that
    encodes. Run it again to go on."""
    from .data.sources import open_source
    from .losses import reads_text
    from .recipe import load_augmentation
    from .tokens.cache import encode_tokens
    from .tokens.encoders import load_encoder

    check(Items | None, limit, "--limit")
    for name, value in (("--shard-size", shard_size), ("--batch-size", batch_size)):
        check(Count, value, name)
    changes = None
    if augmentation is not None:
        if views != "centre":
            raise ValueError(f"--views is {views}, and --augmentation says which copies are encoded: leave out one")
        changes = load_augmentation(augmentation)
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
    training="recipe text_tokenizer start_from steps learning_rate batch_size accumulate max_grad_norm",
    adapter="lora_rank lora_targets",
    machine="seed workers compile gradient_checkpointing fsdp dry_run",
    reports="out validation_prompts report_every log_with",
    checkpoints="checkpoint_every checkpoints_total_limit resume_from",
    hub="push_to_hub hub_token private",
)
def train_model(
    tokens: Tokens,
    out: Out,
    recipe: Recipe,
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
    steps: TrainingSteps = None,
    learning_rate: Annotated[float | None, typer.Option("--lr", help="Highest learning rate.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images or videos per process and batch.")] = None,
    accumulate: Accumulation = None,
    max_grad_norm: MaxGradNorm = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train an adapter of this rank, not the whole model.")] = None,
    lora_targets: Annotated[
        Literal["attention", "all"] | None, typer.Option(help="What an adapter changes: the attention, or all.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, batches and noise. Default: the recipe's.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that prepare batches.")] = None,
    validation_prompts: Annotated[
        Path | None,
        typer.Option(help="Text file with one prompt or class per line, for samples.png. Default: held-out ones."),
    ] = None,
    report_every: Annotated[float, typer.Option(help="Seconds between reports.")] = 900.0,
    log_with: Annotated[
        str | None, typer.Option(help="Tracker that gets the figures too, of accelerate: tensorboard, wandb, ...")
    ] = None,
    checkpoint_every: CheckpointEvery = None,
    checkpoints_total_limit: CheckpointsTotalLimit = None,
    resume_from: ResumeFrom = None,
    push_to_hub: PushToHub = None,
    hub_token: HubToken = None,
    private: Private = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the training needs, time ten steps, and do not begin.")
    ] = False,
    compile: Compile = False,
    gradient_checkpointing: Annotated[
        bool,
        typer.Option("--gradient-checkpointing", help="Compute a language model's layers twice, for less memory."),
    ] = False,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Divide a whole model's weights over the processes of torchrun.")
    ] = False,
    device: Device = None,
) -> None:
    """Train a model of images or videos, from random weights or from a trained model. Needs tokens and a recipe.
    OUT/model is the pipeline, OUT/adapter an adapter.

    Several processes train together: torchrun --nproc-per-node 2 --no-python arimage train model ...
    """
    from .loop import measured_step
    from .processes import join_processes, processes
    from .recipe import TokenRecipe, load_recipe
    from .resuming import alone_in
    from .tokens.beginning import begin_training, plan_of, token_settings
    from .tokens.cache import TokenCache
    from .uploading import check_repository, make_repository, upload

    if push_to_hub is not None:
        check_repository(push_to_hub)
    check_base("--start-from", start_from, out)
    table = load_recipe(recipe, TokenRecipe)
    check(Number, report_every, "--report-every")
    kept = check_kept(checkpoint_every, checkpoints_total_limit, resume_from)
    check(Positive | None, max_grad_norm, "--max-grad-norm")
    check(Count | None, accumulate, "--gradient-accumulation")
    given = {"steps": steps, "learning_rate": learning_rate, "batch_size": batch_size, "workers": workers}
    given |= {"accumulate": accumulate, "gradient_clip": max_grad_norm, "seed": seed}
    settings = token_settings(table, **given, lora_rank=lora_rank, lora_targets=lora_targets)
    if fsdp and settings.lora_rank:
        raise ValueError("--fsdp is for whole models, and an adapter is trained: leave it out")
    prompts = [] if validation_prompts is None else prompt_lines("--validation-prompts", validation_prompts)
    more = {"text_tokenizer": text_tokenizer, "compile": compile, "prompts": prompts}
    more["gradient_checkpointing"] = gradient_checkpointing
    begin = partial(begin_training, table, settings, tokens, heldout or (), start_from, **more)
    join_processes()
    first = processes()[0] == 0
    if fsdp and processes()[1] == 1:
        raise ValueError("--fsdp divides a model over several processes, and this is one: start them with torchrun")
    if dry_run:
        chosen = choose_device(device)
        more = {"text_tokenizer": text_tokenizer, "device": chosen, "sharded": fsdp}
        if first:
            for name, value in plan_of(table, settings, TokenCache(tokens), start_from, **more).items():
                typer.echo(f"{name}: {value:,}" if isinstance(value, int) else f"{name}: {value}")
        seconds, kept_bytes = measured_step(begin(chosen), settings.optimizer)
        if first:
            typer.echo(f"and for the activations of a batch: {kept_bytes:,}")
            typer.echo(
                f"minutes, without exchange: {seconds * settings.optimizer.steps / 60:.1f}, {seconds:.3f} s per step"
            )
        return
    with alone_in(out):
        task = begin(choose_device(device))
        if first:
            typer.echo(task.held_out, err=True)
        if first and push_to_hub is not None:
            make_repository(push_to_hub, hub_token, private)
        task.fit(out, report_every, log_with=log_with, sharded=fsdp, **kept)
    if not first:
        return
    trained = task.trained(out)
    if settings.best is not None:
        typer.echo(f"{out / 'best'}: lowest loss of {settings.best}, at step {int(task.lowest[1])}")
    if push_to_hub is not None:
        upload(push_to_hub, trained if settings.best is None else out / "best", hub_token)
    typer.echo(trained)


@train_app.command("lora")
@panels(
    pictures="data caption prior prior_prompts prior_share",
    adapter="rank alpha targets",
    training="steps learning_rate batch_size accumulate max_grad_norm caption_dropout short_share seed",
    reports="out validation_prompts decoding report_every",
    checkpoints="checkpoint_every checkpoints_total_limit resume_from",
    hub="push_to_hub hub_token private",
)
def lora(
    data: Annotated[str, typer.Option(help=f"{DATA} For a model of classes, captions are their names or ids.")],
    out: Out,
    model: Model = PACKAGED,
    rank: Annotated[int, typer.Option(help="Rank of the adapter.")] = 16,
    alpha: Annotated[float, typer.Option(help="The adapter is scaled by alpha / rank.")] = 16.0,
    targets: Annotated[
        Literal["attention", "all"], typer.Option(help="The attention, or all linear layers of the decoder.")
    ] = "attention",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 500,
    learning_rate: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 1e-4,
    batch_size: Annotated[int, typer.Option(help="Pictures per batch.")] = 8,
    accumulate: Annotated[int, typer.Option("--gradient-accumulation", help="Batches per step.")] = 1,
    max_grad_norm: Annotated[float, typer.Option(help="Longer gradients are shortened to this norm.")] = 1.0,
    caption: Annotated[
        str | None,
        typer.Option(help='Caption template, e.g. "{} in blue ink". {} is replaced by the caption of each image.'),
    ] = None,
    caption_dropout: Annotated[float, typer.Option(help="Share of pictures learned without a caption.")] = 0.1,
    prior: Annotated[
        str | None, typer.Option(help="Pictures with captions that the model should keep, as --data.")
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
    checkpoint_every: CheckpointEvery = None,
    checkpoints_total_limit: CheckpointsTotalLimit = None,
    resume_from: ResumeFrom = None,
    push_to_hub: PushToHub = None,
    hub_token: HubToken = None,
    private: Private = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = "auto",
) -> None:
    """Train a LoRA adapter for a finished model. Needs images with captions. OUT/best has the lowest held-out loss,
    OUT/last is the last one, and OUT/samples.png shows the base and the adapter at the scales 0.5 and 1."""
    from .adapters.lora import LoraSettings, LoraTask, looks_of, warning_of_poor_pictures
    from .adapters.pairs import load_pairs
    from .cards import data_name
    from .resuming import alone_in
    from .uploading import check_repository, make_repository, upload

    if push_to_hub is not None:
        check_repository(push_to_hub)
    if prior is not None and prior_prompts is not None:
        raise ValueError("--prior and --prior-prompts both name old pictures: give one of the two")
    settings = LoraSettings(
        rank,
        alpha,
        targets,
        steps,
        learning_rate,
        batch_size,
        caption_dropout,
        prior_share,
        short_share,
        seed,
        check(Count, accumulate, "--gradient-accumulation"),
        check(Positive, max_grad_norm, "--max-grad-norm"),
    )
    check(Number, report_every, "--report-every")
    kept = check_kept(checkpoint_every, checkpoints_total_limit, resume_from)
    prompts = [] if validation_prompts is None else prompt_lines("--validation-prompts", validation_prompts)
    pipe = load_pipeline(model, device, dtype, videos=True, continues=True)
    if pipe.abilities.generates_video:
        raise ValueError(
            f"{model} generates videos, and this command takes pictures: use `arimage train tokens`, then `arimage "
            "train model --start-from ... --lora-rank 16`"
        )
    size = pipe.image_sizes[0]
    numbers = pipe.num_classes is not None
    pictures = load_pairs(data, size, caption, numbers=numbers)
    old = None if prior is None else load_pairs(prior, size, numbers=numbers)
    with alone_in(out):
        if prior_prompts is not None:
            from ..eval.runs.prompts import prompt_file, read_prompts
            from .adapters.generated import generate_prior

            asked = [row["prompt"] for row in read_prompts(prompt_file(prior_prompts))]
            old = generate_prior(pipe, asked, out / "prior.safetensors", seed=seed, decoding=decoding)
        parts = {"base": model, "name": data_name(data), "prior": old, "prompts": prompts, "decoding": decoding}
        task = LoraTask(pipe, pictures, settings, **parts)
        task.check(out, resume_from)
        if push_to_hub is not None:
            make_repository(push_to_hub, hub_token, private)
        psnr, own = task.report_reconstructions(out)
        typer.echo(
            f"the image tokenizer reproduces these pictures {looks_of(psnr)}, at {psnr:.1f} dB"
            + ("" if own is None else f", prior ones at {own:.1f} dB")
            + f": see {out / 'reconstructions-pictures.png'}"
        )
        if warning := warning_of_poor_pictures(psnr, own):
            typer.echo(f"warning: {warning}", err=True)
        task.fit(out, report_every, **kept)
    if push_to_hub is not None:
        upload(push_to_hub, out / "best", hub_token)
    typer.echo(f"{out / 'best'}: held-out loss {task.best[0]:.4f} at step {int(task.best[1])}")


@train_app.command("tokenizer")
def tokenizer(
    data: Images,
    heldout: HeldoutImages,
    recipe: Recipe,
    out: Out,
    steps: TrainingSteps = None,
    split: Split = "train",
    heldout_split: HeldoutSplit = "train",
    image: ImageColumn = None,
    workers: WorkerCount = 2,
    device: Device = None,
) -> None:
    """Train an image tokenizer. Needs images, held-out ones, and a recipe. OUT/tokenizer/tokenizer is for `arimage
    train tokens`."""
    from .recipe import TokenizerRecipe, load_recipe
    from .resuming import alone_in
    from .tokenizers.reconstructions import held_out_psnr
    from .tokenizers.tokenizer import run_tokenizer

    check(Workers, workers, "--workers")
    options = {"split": split, "heldout_split": heldout_split, "image": image, "workers": workers}
    table = load_recipe(recipe, TokenizerRecipe, steps=steps)
    with alone_in(out):
        run_tokenizer(table, data, heldout, out, choose_device(device), **options)
        psnr = held_out_psnr(out / "tokenizer")
    typer.echo(f"{out / 'tokenizer' / 'tokenizer'}: {psnr:.2f} dB")


def part_command(name: str, text: str) -> None:
    """Add the command that trains a part of a finished model; `text` says what it is."""

    def train_part(
        tokens: Tokens,
        out: Out,
        model: Annotated[
            str, typer.Option(callback=check_models, help="Model that encoded the tokens: a name or a folder.")
        ],
        heldout: Annotated[
            Path | None, typer.Option(help="The same for held-out images. Default: a tenth of --tokens, at most 512.")
        ] = None,
        recipe: Recipe = name,
        steps: TrainingSteps = None,
        device: Device = None,
        dtype: Dtype = "float32",
    ) -> None:
        from importlib import import_module

        from .acceleration.parts import run_part
        from .processes import join_processes
        from .recipe import PartRecipe, load_recipe
        from .resuming import alone_in

        check_base("--model", model, out)
        join_processes()
        parts = load_recipe(recipe, PartRecipe, name, steps=steps), load_pipeline(model, device, dtype)
        what = "window_drafter" if parts[0].kind == "window" else name
        begin = getattr(import_module(f".acceleration.{what}", __package__), f"begin_{what}")
        with alone_in(out):
            figures = run_part(begin, *parts, tokens, heldout, out)
        for what, value in figures.items():
            typer.echo(f"{what}: {value:.3f}")
        typer.echo(out / "model")

    train_part.__doc__ = f"{text} Needs the model and tokens of it.\n\nOUT/model is the model with it."
    train_app.command(name, rich_help_panel=PARTS)(train_part)


part_command(
    "drafter",
    'Train a drafter for a LlamaGen, for the decoding "eagle", or, by the recipe "window-drafter", one for the '
    'setting "corrections" of "sjd-coupled".',
)
part_command("denoiser", 'Train a denoiser for a LlamaGen, for the decoding "sjd2".')
part_command("refiner", 'Train a refiner for a VAR, for the decoding "code".')
part_command(
    "student", 'Train a student of a LlamaGen or of a VAR, for the decodings "few-step" and, of a LlamaGen, "flow".'
)


@train_app.command("neighbours", rich_help_panel=PARTS)
def neighbours(
    tokens: Tokens,
    out: Out,
    model: Model = PACKAGED,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Fit a model of neighbours to a LlamaGen or a language model, in minutes, for the setting "corrections" of
    "sjd-coupled". Needs tokens of the model. OUT/model is the model with it."""
    from .acceleration.neighbours import run_neighbours
    from .resuming import alone_in

    check_base("--model", model, out)
    pipe = load_pipeline(model, device, dtype)
    with alone_in(out):
        run_neighbours(pipe, tokens, out)
    typer.echo(out / "model")


@train_app.command("upscaler", rich_help_panel=PARTS)
def upscaler(
    data: Images,
    heldout: HeldoutImages,
    out: Out,
    model: Model = PACKAGED,
    recipe: Recipe = "upscaler",
    steps: TrainingSteps = None,
    split: Split = "train",
    heldout_split: HeldoutSplit = "train",
    image: ImageColumn = None,
    workers: WorkerCount = 2,
    device: Device = None,
    dtype: Dtype = "float32",
) -> None:
    """Train an upscaler for the image tokenizer of a finished model, for images of twice as many pixels along each
    side from the same tokens. Needs images and held-out ones. OUT/model is the model with its upscaler."""
    from .recipe import PartRecipe, load_recipe
    from .resuming import alone_in
    from .tokenizers.upscaler import run_upscaler

    check(Workers, workers, "--workers")
    check_base("--model", model, out)
    options = {"split": split, "heldout_split": heldout_split, "image": image, "workers": workers}
    parts = load_recipe(recipe, PartRecipe, "upscaler", steps=steps), load_pipeline(model, device, dtype)
    with alone_in(out):
        run_upscaler(*parts, data, heldout, out, **options)
    typer.echo(out / "model")
