"""The console commands `arimage eval ...`. Heavy imports stay inside the commands, as in `arimage.cli`."""

import hashlib
import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..options import (
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


eval_app = typer.Typer(help="Draw many images, score them, and set the decodings' quality beside their speed.")

Prompts = Annotated[
    str | None,
    typer.Option(
        help="A .tsv with a column prompt or Prompt, a .jsonl of objects with a prompt, a .txt with one on every line; or "
        "emoji for those of the package."
    ),
]
PerPrompt = Annotated[int, typer.Option(help="Images of each prompt.")]
Classes = Annotated[int | None, typer.Option(help="Draw the classes 0 to one less than this, instead of prompts.")]
PerClass = Annotated[int, typer.Option(help="Images of each class.")]
Ref = Annotated[
    Path | None, typer.Option(help="A folder of pictures, or a .npz of statistics (mu, sigma) or of pictures (arr_0).")
]
InceptionWeights = Annotated[
    Path | None, typer.Option(envvar="ARIMAGE_INCEPTION_WEIGHTS", help="The file of FID's network.")
]
Clip = Annotated[Path | None, typer.Option(help="A folder with a CLIP model, for the CLIP score.")]
ResizeOption = Annotated[
    Literal["clean", "tf1"],
    typer.Option(help="As clean-fid does, or as the first FID and the ADM evaluator; they take different weights."),
]


def manifest(prompts: str | None, per_prompt: int, classes: int | None, per_class: int, seed: int):
    """The rows of the manifest, and where they came from, for the config."""
    from .manifest import class_rows, prompt_file, prompt_rows, read_prompts

    if (prompts is None) == (classes is None):
        raise ValueError("give either --prompts or --classes")
    if classes is not None:
        return class_rows(classes, seed, per_class), {"classes": classes, "per_class": per_class}
    path = prompt_file(prompts)
    rows = prompt_rows(read_prompts(path), seed, per_prompt)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return rows, {"prompts": path.name, "sha256": digest, "per_prompt": per_prompt}


@eval_app.command()
def generate(
    out: Annotated[
        Path, typer.Option(help="The folder of the run; one that was begun by this command is gone on with.")
    ],
    prompts: Prompts = None,
    per_prompt: PerPrompt = 1,
    classes: Classes = None,
    per_class: PerClass = 1,
    model: Model = DEFAULT_MODEL,
    decoding: Annotated[str | None, typer.Option(help="As in `arimage generate`; the model's by default.")] = None,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(help="Images a call.")] = 16,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    height: Annotated[int | None, typer.Option(help="In pixels; the model's by default.")] = None,
    width: Annotated[int | None, typer.Option(help="As --height.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")] = "float32",
    device: Device = None,
    engine: Annotated[
        Literal["processes", "ray"],
        typer.Option(help="This process and those that torchrun or accelerate start with it, or Ray's workers."),
    ] = "processes",
    workers: Annotated[
        int | None, typer.Option(help="With --engine ray: one for each GPU by default, or one where there is none.")
    ] = None,
) -> None:
    """Draw an image for every row of a manifest, into --out. Interrupt it at any time: the same command goes on, and the
    images are those of an undisturbed run, for any number of processes."""
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("--engine ray needs Ray: pip install 'arimage[ray]'")
    rows, source = manifest(prompts, per_prompt, classes, per_class, seed)

    from .generate import generate_by_processes, join_processes, make_config

    state = join_processes(device)
    if state.num_processes > 1 and device is None:
        device = str(state.device)
    pipe = load_pipeline(model, device, dtype)
    config = make_config(
        pipe,
        rows,
        model=model,
        source=source,
        seed=seed,
        batch_size=batch_size,
        decoding=decoding,
        sampling={"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p},
        height=height,
        width=width,
    )
    if engine == "ray":
        from .ray_engine import generate_by_ray

        generate_by_ray(config, rows, out, device, workers)
    else:
        generate_by_processes(pipe, config, rows, out, state)
    if state.is_main_process:
        typer.echo(out)


@eval_app.command()
def score(
    run: Annotated[Path, typer.Argument(help="The folder of a finished `arimage eval generate`.")],
    metrics: Annotated[
        str,
        typer.Option(
            help="Of fid, kid, prdc (precision, recall, density, coverage), clip, emoji-kid and retrieval, with commas between."
        ),
    ],
    ref: Ref = None,
    inception_weights: InceptionWeights = None,
    clip: Clip = None,
    resize: ResizeOption = "clean",
    batch_size: Annotated[int, typer.Option(help="Pictures a call of the networks.")] = 32,
    device: Device = None,
) -> None:
    """Score the images of a run; the figures go to RUN/metrics.json, beside those that are there."""
    device = choose_device(device)

    from .score import Job
    from .score import score as score_run

    job = Job(run, ref, inception_weights, clip, resize, device, batch_size)
    for name, entry in score_run(job, [name.strip() for name in metrics.split(",")]).items():
        error = "" if entry["standard_error"] is None else f" ± {entry['standard_error']:.2g}"
        typer.echo(f"{name}: {entry['value']:.6g}{error} ({entry['count']} images, {entry['reference']})")
        weights = entry.get("weights", "published")
        if weights != "published":
            typer.echo(f"{name}: weights {weights}", err=True)


def check_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("a report has a plot, which needs matplotlib: pip install 'arimage[eval]'")


@eval_app.command()
def export(
    run: Annotated[Path, typer.Argument(help="The folder of a finished `arimage eval generate`.")],
    format: Annotated[
        Literal["adm-npz", "geneval", "dpg", "result-jsonl"],
        typer.Option(
            help="For the evaluator of ADM (ImageNet's FID, sFID, IS, precision, recall), GenEval, DPG-Bench, or what reads "
            "LlamaGen's text-to-image runs."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The file of adm-npz, the folder of the others; it must not exist.")],
    size: Annotated[
        int | None, typer.Option(help="With adm-npz: resize to so many pixels, as LlamaGen does from 384 to 256.")
    ] = None,
) -> None:
    """Write the images of a run as other people's scorers read them."""
    from .export import export as export_run

    export_run(run, format, out, size)
    typer.echo(out)


@eval_app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished `arimage eval generate`, one a decoding.")],
    baseline: Annotated[str, typer.Option(help="The name of the folder that the others are compared to.")],
    out: Annotated[Path, typer.Option(help="The folder for report.json, report.md and report.png.")],
) -> None:
    """Set quality beside cost for runs that differ in their decoding alone."""
    check_matplotlib()

    from .report import make_report, write_report

    typer.echo(write_report(make_report(runs, baseline), out))


@eval_app.command()
def compare(
    out: Annotated[Path, typer.Option(help="The folder for a run a decoding and the report.")],
    model: Model = DEFAULT_MODEL,
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            help="As in `arimage generate`; repeat it for more, the first is what the others are compared to. All that the "
            "model can do by default."
        ),
    ] = None,
    prompts: Prompts = None,
    per_prompt: PerPrompt = 1,
    classes: Classes = None,
    per_class: PerClass = 1,
    seed: Seed = 0,
    batch_size: Annotated[int, typer.Option(help="Images a call.")] = 16,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    height: Annotated[int | None, typer.Option(help="In pixels; the model's by default.")] = None,
    width: Annotated[int | None, typer.Option(help="As --height.")] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option(help="Of the weights.")] = "float32",
    metrics: Annotated[
        str | None,
        typer.Option(
            help="As in `arimage eval score`; emoji-kid,retrieval for --prompts emoji, else none by default."
        ),
    ] = None,
    ref: Ref = None,
    inception_weights: InceptionWeights = None,
    clip: Clip = None,
    resize: ResizeOption = "clean",
    device: Device = None,
) -> None:
    """Draw the same images by several decodings in turn, score them, and set quality beside cost. Interrupt it at any time:
    the same command goes on."""
    check_matplotlib()
    if prompts is None and classes is None:
        prompts = "emoji"
    rows, source = manifest(prompts, per_prompt, classes, per_class, seed)
    if metrics is None:
        metrics = "emoji-kid,retrieval" if prompts == "emoji" else ""

    from . import compare as comparison
    from .score import Job

    pipe = load_pipeline(model, device, dtype)
    sampling = {"guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    runs, left_out = comparison.prepare_runs(
        pipe,
        rows,
        decoding or [],
        out,
        model=model,
        source=source,
        seed=seed,
        batch_size=batch_size,
        sampling={name: value for name, value in sampling.items() if value is not None},
        height=height,
        width=width,
    )
    if left_out:
        typer.echo(f"left out {'; '.join(f'{name} ({why})' for name, why in left_out.items())}", err=True)

    def job(run: Path) -> Job:
        return Job(run, ref, inception_weights, clip, resize, str(pipe.device), batch_size)

    typer.echo(comparison.compare(runs, pipe, [name for name in metrics.split(",") if name], job, out))
