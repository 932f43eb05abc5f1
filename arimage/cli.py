"""The console command `arimage`. Heavy imports stay inside the commands, so that help comes at once."""

import inspect
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from .eval.commands import eval_app
from .options import (
    DEFAULT_MODEL,
    Device,
    GuidanceScale,
    Model,
    Seed,
    Temperature,
    TopK,
    TopP,
    choose_device,
    load_pipeline,
)


app = typer.Typer(
    help="Draw images with autoregressive models, faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
convert_app = typer.Typer(help="Turn published checkpoint files into a folder that every command loads.")
train_app = typer.Typer(help="Train a model by a recipe; run a command again to continue an interrupted run.")
app.add_typer(convert_app, name="convert", no_args_is_help=True)
app.add_typer(train_app, name="train", no_args_is_help=True)
app.add_typer(eval_app, name="eval", no_args_is_help=True)

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="What to draw; one or more.")] = None,
    file: Annotated[Path | None, typer.Option(help="A text file with a prompt on every line.")] = None,
    class_label: Annotated[list[int] | None, typer.Option(help="A class id, for class-conditional models.")] = None,
    model: Model = DEFAULT_MODEL,
    decoding: Annotated[
        str | None,
        typer.Option(
            help="The model's by default, or a name with settings, as in sjd-lazy:window=64; `arimage decodings` lists them."
        ),
    ] = None,
    image: Annotated[
        Path | None,
        typer.Option(help="A picture to change; --mask-image says where. It is resized to the model's size."),
    ] = None,
    mask_image: Annotated[
        Path | None, typer.Option(help="White where --image is drawn anew, black where it is kept.")
    ] = None,
    height: Annotated[int | None, typer.Option(help="In pixels; the model's by default.")] = None,
    width: Annotated[int | None, typer.Option(help="As --height.")] = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="What to guide away from, for models that know such prompts (Emu3).")
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", help="Images of each prompt.")] = 1,
    seed: Seed = 0,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    out: Annotated[
        Path, typer.Option(help="A picture file, which shows all images in a grid, or a folder of one file an image.")
    ] = Path("outputs"),
    trace: Annotated[
        Path | None,
        typer.Option(help="An animation, .webp or .gif, of how the first image was decoded, pass by pass."),
    ] = None,
    acceptance_map: Annotated[
        Path | None, typer.Option(help="A picture of which pass decided each code of the first image.")
    ] = None,
    device: Device = None,
) -> None:
    """Draw images and write them to --out."""
    texts = list(prompts or [])
    if file is not None:
        texts += [line.strip() for line in file.read_text().splitlines() if line.strip()]
    labels = list(class_label or [])
    if bool(texts) == bool(labels):
        raise ValueError('give prompts, as in `arimage generate "a red heart"`, or --class-label')
    is_file = out.suffix.lower() in IMAGE_SUFFIXES
    if not is_file and out.suffix and not out.is_dir():
        raise ValueError(
            f"--out {out} is no picture file: end it in one of {', '.join(IMAGE_SUFFIXES)}, or name a folder"
        )
    for option, path, suffixes in (
        ("--trace", trace, (".webp", ".gif")),
        ("--acceptance-map", acceptance_map, IMAGE_SUFFIXES),
    ):
        if path is not None and path.suffix.lower() not in suffixes:
            raise ValueError(f"{option} {path} cannot be written: end it in one of {', '.join(suffixes)}")
    if (image is None) != (mask_image is None):
        raise ValueError("--image and --mask-image belong together: give both, or neither")
    for folder in (out.parent if is_file else out, *(path.parent for path in (trace, acceptance_map) if path)):
        folder.mkdir(parents=True, exist_ok=True)

    import torch

    from .decoding import decoding_from_text
    from .eval.trace import Trace, animate, draw_acceptance_map
    from .pipelines.pipeline_var import VARPipeline

    method = None
    if decoding is not None:
        method = decoding_from_text(decoding)
    pipe = load_pipeline(model, device)
    if acceptance_map is not None and isinstance(pipe, VARPipeline):
        raise ValueError(
            "--acceptance-map has nothing to show where a pass decides a whole scale: leave it out, or --trace"
        )
    recorder = Trace() if trace or acceptance_map else None
    condition = {"prompt": texts} if texts else {"class_labels": labels}
    if negative_prompt is not None:
        if "negative_prompt" not in inspect.signature(pipe.__call__).parameters:
            raise ValueError(f"{model} knows no negative prompt: leave out --negative-prompt")
        condition["negative_prompt"] = negative_prompt
    if image is not None:
        from PIL import Image

        condition |= {"image": Image.open(image), "mask_image": Image.open(mask_image)}
    output = pipe(
        **condition,
        height=height,
        width=width,
        num_images_per_prompt=count,
        generator=torch.Generator().manual_seed(seed),
        decoding=method,
        guidance_scale=guidance_scale,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        callback_on_step_end=recorder,
        callback_on_step_end_tensor_inputs=Trace.inputs,
    )
    images, stats = output.images, output.stats
    if is_file:
        from diffusers.utils import make_image_grid

        # The widest grid without empty cells that is not wider than eight images or one prompt's.
        columns = count if count > 1 else max(n for n in range(1, 9) if len(images) % n == 0)
        make_image_grid(images, rows=len(images) // columns, cols=columns).save(out)
        written = [out]
    else:
        names = [text for text in (texts or [f"class {label}" for label in labels]) for _ in range(count)]
        written = []
        for i, (name, image) in enumerate(zip(names, images, strict=True)):
            slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
            written.append(out / f"{slug or 'image'}-{seed}-{i}.png")
            image.save(written[-1])
    if recorder is not None:
        tokens, decided = recorder.of_image(0)
        grid = None if isinstance(output.tokens, list) else output.tokens.shape[1:]
        title = f"{decoding or type(pipe.decoding).__name__}: {texts[0] if texts else f'class {labels[0]}'}"
        if trace is not None:
            with torch.no_grad():
                animate(tokens, decided, grid, pipe.draw_codes, title, trace)
            written.append(trace)
        if acceptance_map is not None:
            draw_acceptance_map(decided, grid, images[0], title, acceptance_map)
            written.append(acceptance_map)
    for path in written:
        typer.echo(path)
    typer.echo(
        f"{len(images)} images, {stats.forward_passes} forward passes, {stats.tokens_per_pass:.1f} tokens a pass, "
        f"{stats.prefill_seconds + stats.decode_seconds:.1f} s decoding, {stats.tokenizer_seconds:.1f} s pictures",
        err=True,
    )


@app.command()
def models() -> None:
    """List the models that are known by name."""
    from rich.console import Console
    from rich.table import Table

    from .auto import packaged_models
    from .convert.published import PUBLISHED

    table = Table("name", "pixels", "parameters", "guidance, top-k", "from", "files", "licence")
    for name in packaged_models():
        table.add_row(name, "", "", "", "this package", "", "Apache-2.0, see its README.md")
    for entry in PUBLISHED:
        table.add_row(
            entry.name,
            str(entry.image_size),
            f"{entry.parameters / 1e6:.0f} M",
            f"{entry.sampling['guidance_scale']}, {entry.sampling['top_k']}",
            entry.repository,
            f"{entry.transformer_file}, {entry.tokenizer_file}",
            entry.weights_licence or f"{entry.code_licence} (code); weights: see the repository",
        )
    # Whole names in a pipe, where nobody folds a table by eye.
    Console(width=None if sys.stdout.isatty() else 240).print(table)


@app.command()
def decodings() -> None:
    """List the decodings that are known by name, with their settings."""
    from rich.console import Console
    from rich.table import Table

    from .decoding import PRESETS, decoding_from_name, decoding_to_dict

    table = Table("name", "exact", "what it does", "settings", "paper")
    for name, preset in PRESETS.items():
        decoding = decoding_from_name(name)
        settings = [
            f"{key}={value['method'] if isinstance(value, dict) else value}"
            for key, value in decoding_to_dict(decoding).items()
        ]
        paper = f"arXiv {preset.paper}" if preset.paper else ""
        table.add_row(name, "yes" if decoding.exact else "no", preset.summary, ", ".join(settings[1:]), paper)
    Console(width=None if sys.stdout.isatty() else 240).print(table)


@app.command()
def bench(
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            help="A decoding to measure, with settings if need be, as in sjd-coupled:window=16,init=left; repeat it for "
            "more. All that the model can do by default; `arimage decodings` lists them."
        ),
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Drafts ahead, for every decoding that has a window; repeat it for more.")
    ] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="Images a call, 1 by default; repeat it for more.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"As in `arimage generate`, {DEFAULT_MODEL} by default; repeat it for more."),
    ] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; a batch has one image of each in turn.")] = None,
    class_label: Annotated[list[int] | None, typer.Option(help="A class id, for class-conditional models.")] = None,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    runs: Annotated[int, typer.Option(help="Timed calls of each decoding, taken in turn.")] = 5,
    images: Annotated[
        int, typer.Option(help="Images that tell how far a decoding is from the model's law; 0 skips this.")
    ] = 16,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="A JSON file for every run's figures; see `bench-compare`.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="A picture file for the figures as bars; needs matplotlib.")
    ] = None,
    device: Device = None,
) -> None:
    """Measure passes, seconds, memory and faithfulness of the decodings, side by side."""
    import importlib.util

    for option, path in (("--out", out), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{option} {path} lies in no folder: make {path.parent} first")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'arimage[eval]'")
    if images < 0:
        raise ValueError(f"--images is {images}: give a number of images, or 0 to skip")

    from .eval import bench

    condition = {"class_labels": class_label} if class_label else {"prompt": prompt or ["a red heart"]}
    options = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    sampling = {name: value for name, value in options.items() if value is not None}
    rows = []
    for name in model or [DEFAULT_MODEL]:
        pipe = load_pipeline(name, device)
        chosen, left_out = bench.choose_decodings(pipe, condition, decoding or [], window or [], sampling)
        if left_out:
            reasons = "; ".join(f"{text} ({why})" for text, why in left_out.items())
            typer.echo(f"{name}: left out {reasons}", err=True)
        measured = []
        for size in batch_size or [1]:
            measured += bench.measure(
                pipe, condition, chosen, batch_size=size, runs=runs, seed=seed, sampling=sampling
            )
        judged = {}
        if images:
            for text, one in chosen.items():
                judged[text] = bench.judge(pipe, condition, one, images=images, seed=seed, sampling=sampling)
        rows += [{"model": name, **row, **judged.get(row["decoding"], {})} for row in measured]
    results = {
        "machine": bench.machine(pipe._execution_device),
        "settings": {"condition": condition, "runs": runs, "images": images, "seed": seed},
        "rows": rows,
    }
    typer.echo(bench.to_markdown(results))
    if out is not None:
        bench.write_json(results, out)
    if plot is not None:
        bench.plot(results, plot)


@app.command()
def serve(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="As in `arimage generate`, repeat it for more; the packaged ones by default. No others are drawn."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; others than this machine's own need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the token that clients send as their API key; or set ARIMAGE_TOKEN."),
    ] = None,
    no_auth: Annotated[bool, typer.Option("--no-auth", help="Let everybody in on any --host.")] = False,
    base_url: Annotated[
        str | None, typer.Option(help="What the urls of pictures begin with, where a proxy stands before the server.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Images drawn together.")] = 8,
    queue: Annotated[int, typer.Option(help="Requests that may wait.")] = 64,
    images: Annotated[int, typer.Option(help="Images that a request may ask for.")] = 8,
    device: Device = None,
) -> None:
    """Answer requests of the OpenAI Images API."""
    try:
        from .app.serving import check_access, serve_forever
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed, which the server needs: pip install 'arimage[serve]'"
        ) from error

    from .app.engine import Engine, Limits
    from .app.models import load_models

    token = check_access(host, token_file, no_auth)
    limits = Limits(batch=batch, queue=queue, images=images)
    engine = Engine(load_models(model, device), limits)
    serve_forever(engine, host, port, token, base_url)


@app.command("app")
def app_command(
    model: Annotated[
        list[str] | None,
        typer.Option(help="As in `arimage generate`, repeat it for more; the packaged ones by default."),
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 lets others in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Where to listen.")] = 7860,
    auth: Annotated[
        str | None, typer.Option(envvar="ARIMAGE_APP_AUTH", help="user:password that the page asks for.")
    ] = None,
    device: Device = None,
) -> None:
    """Open the demo: pictures while they are decoded, decodings side by side, edits."""
    try:
        from .app.demo import serve_demo
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed, which the app needs: pip install 'arimage[app]'") from error
    user, _, password = (auth or "").partition(":")
    if auth is not None and not (user and password):
        raise ValueError("--auth is not of the form user:password: give both, with a colon between")

    from .app.engine import Engine
    from .app.models import load_models

    serve_demo(Engine(load_models(model, device)), host, port, (user, password) if auth else None)


@app.command("bench-compare")
def bench_compare(
    old: Annotated[Path, typer.Argument(help="A file that `arimage bench --out` wrote.")],
    new: Annotated[Path, typer.Argument(help="Another one, of the same models on the same machine.")],
) -> None:
    """Show two results of `arimage bench` side by side."""
    from .eval.bench import compare, read_json

    typer.echo(compare(read_json(old), read_json(new)))


@convert_app.command("llamagen")
def convert_llamagen_command(
    transformer: Annotated[Path, typer.Option(help="The transformer's .pt or .safetensors file.")],
    tokenizer: Annotated[Path, typer.Option(help="The VQ tokenizer's file.")],
    image_size: Annotated[int, typer.Option(help="Pixels along each side that the transformer was trained for.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    num_heads: Annotated[
        int | None, typer.Option(help="Attention heads, where the size is not a published one.")
    ] = None,
    text_encoder: Annotated[Path | None, typer.Option(help="A folder with the T5 encoder and its tokenizer.")] = None,
) -> None:
    """Convert LlamaGen's published files."""
    from .convert import convert_llamagen

    convert_llamagen(transformer, tokenizer, image_size, num_heads=num_heads, text_encoder=text_encoder, out=out)
    typer.echo(out)


@convert_app.command("var")
def convert_var_command(
    transformer: Annotated[Path, typer.Option(help="The transformer's .pth or .safetensors file.")],
    tokenizer: Annotated[Path, typer.Option(help="The VQ tokenizer's file.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
) -> None:
    """Convert VAR's published files, or a trainer's ar-ckpt-*.pth."""
    from .convert import convert_var

    convert_var(transformer, tokenizer, out=out)
    typer.echo(out)


@convert_app.command("janus")
def convert_janus_command(
    folder: Annotated[Path, typer.Argument(help="As published by deepseek-ai or deepseek-community.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    template: Annotated[
        str | None,
        typer.Option(help="How prompts are written: janus for Janus-1.3B, janus-pro; by default as the folder says."),
    ] = None,
) -> None:
    """Convert a published Janus or Janus-Pro."""
    from .convert import convert_janus

    convert_janus(folder, template=template, out=out)
    typer.echo(out)


@convert_app.command("emu3")
def convert_emu3_command(
    folder: Annotated[Path, typer.Argument(help="Emu3-Gen or Emu3-Stage1, as published by BAAI or for transformers.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    vision_tokenizer: Annotated[
        Path | None, typer.Option(help="BAAI's folder Emu3-VisionTokenizer, which goes with BAAI's other folders.")
    ] = None,
    image_area: Annotated[
        int | None, typer.Option(help="Pixels of a trained image, where it is not in the folder: 262144 for Stage1.")
    ] = None,
) -> None:
    """Convert a published Emu3-Gen or Emu3-Stage1."""
    from .convert import convert_emu3

    convert_emu3(folder, vision_tokenizer=vision_tokenizer, image_area=image_area, out=out)
    typer.echo(out)


ChameleonTokenizer = Annotated[
    Path | None,
    typer.Option(help="Meta's folder with vqgan.ckpt and text_tokenizer.json; of Lumina-mGPT 2.0 movqgan_270M.ckpt."),
]


@convert_app.command("lumina-mgpt")
def convert_lumina_mgpt_command(
    folder: Annotated[Path, typer.Argument(help="Lumina-mGPT or Lumina-mGPT 2.0, as published by Alpha-VLLM.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    tokenizer: ChameleonTokenizer = None,
    image_size: Annotated[int, typer.Option(help="What the weights were trained for: 512, 768 or 1024.")] = 768,
) -> None:
    """Convert a published Lumina-mGPT."""
    from .convert import convert_lumina_mgpt

    convert_lumina_mgpt(folder, tokenizer=tokenizer, image_size=image_size, out=out)
    typer.echo(out)


@convert_app.command("anole")
def convert_anole_command(
    folder: Annotated[
        Path, typer.Argument(help="Anole, or another Chameleon, in Meta's format or that of transformers.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to write; it must not exist.")],
    tokenizer: ChameleonTokenizer = None,
) -> None:
    """Convert a published Anole."""
    from .convert import convert_anole

    convert_anole(folder, tokenizer=tokenizer, out=out)
    typer.echo(out)


Recipe = Annotated[str, typer.Option(help="A packaged model's name or a TOML file.")]
Train = Annotated[Path, typer.Option("--data", help="The training set, a parquet file.")]
Heldout = Annotated[Path, typer.Option(help="The held-out set, a parquet file.")]
Out = Annotated[Path, typer.Option(help="The folder of the run.")]


@train_app.command("tokenizer")
def train_tokenizer_command(
    data: Annotated[Path, typer.Option(help="The training set: a parquet file or a folder of images.")],
    heldout: Annotated[Path, typer.Option(help="The held-out set, of the same kinds.")],
    out: Out,
    recipe: Recipe = DEFAULT_MODEL,
    device: Device = None,
) -> None:
    """Train the image tokenizer of a recipe."""
    from .training.recipe import load_recipe, run_tokenizer

    run_tokenizer(load_recipe(recipe), data, heldout, out, choose_device(device))


@train_app.command("transformer")
def train_transformer_command(
    data: Train, heldout: Heldout, out: Out, recipe: Recipe = DEFAULT_MODEL, device: Device = None
) -> None:
    """Train the transformer of a recipe, and the refiner of a VAR; --out must hold the trained tokenizer."""
    from .training.recipe import load_recipe, run_transformer

    run_transformer(load_recipe(recipe), data, heldout, out, choose_device(device))


@train_app.command("drafter")
def train_drafter_command(
    data: Train,
    heldout: Heldout,
    out: Out,
    model: Model = DEFAULT_MODEL,
    recipe: Recipe = DEFAULT_MODEL,
    device: Device = None,
) -> None:
    """Train a drafter for a finished model, for the decodings "eagle"; OUT/model is the model with its drafter."""
    from .training.recipe import load_recipe, run_drafter

    run_drafter(load_recipe(recipe), load_pipeline(model, device), data, heldout, out)


@train_app.command("collaborate")
def train_collaborate_command(
    data: Train,
    heldout: Heldout,
    out: Out,
    model: Model = "emoji-var",
    recipe: Recipe = "emoji-var",
    device: Device = None,
) -> None:
    """Fine-tune a large and a small VAR transformer, each for its scales of the decoding "code"; OUT/model is the pair."""
    from .training.recipe import load_recipe, run_collaborate

    run_collaborate(load_recipe(recipe), load_pipeline(model, device), data, heldout, out)


@train_app.command("classifier")
def train_classifier_command(
    data: Train, heldout: Heldout, out: Out, recipe: Recipe = DEFAULT_MODEL, device: Device = None
) -> None:
    """Train the classifier of `arimage eval score --metrics emoji-kid`; OUT/reference is what scores a model of the recipe."""
    from .training.classifier import run_classifier
    from .training.recipe import load_recipe

    run_classifier(load_recipe(recipe), data, heldout, out, choose_device(device))


@train_app.command("all")
def train_all_command(
    data: Train, heldout: Heldout, out: Out, recipe: Recipe = DEFAULT_MODEL, device: Device = None
) -> None:
    """Train the tokenizer, then the transformer: what made a packaged model; it lies in OUT/model."""
    train_tokenizer_command(data, heldout, out, recipe, device)
    train_transformer_command(data, heldout, out, recipe, device)


def main() -> None:
    """Run the command; what a user can mend is one sentence and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        print(f"arimage: {message}", file=sys.stderr)
        sys.exit(2)
