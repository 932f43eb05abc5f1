"""The console commands `arimage eval ...`. Heavy imports stay inside the commands, as in `arimage.cli.main`."""

import contextlib
import importlib.util
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..cli.options import (
    DEFAULT_MODEL,
    BatchSize,
    ClassLabels,
    CompileSteps,
    DecoderGuidanceScale,
    Decoding,
    Device,
    Dtype,
    Eager,
    GuidanceScale,
    Loras,
    MinP,
    Model,
    NegativePrompt,
    NumInferenceSteps,
    OrderOption,
    Orders,
    Pixels,
    Seed,
    Temperature,
    TopK,
    TopP,
    check_classes,
    check_decodings,
    check_output,
    check_prompts,
    choose_device,
    class_labels_of,
    load_pipeline,
    number,
    output,
    panels,
    sampling_options,
    steps_of,
    supported,
)
from ..settings.schema import LARGEST
from .options import (
    PER_PROMPT,
    Classes,
    DryRun,
    InceptionWeights,
    PerClass,
    PerPrompt,
    Prompts,
    Ref,
    check_extra,
    names_in,
    networks,
)
from .score_commands import make_stats, score, score_tokenizer


eval_app = typer.Typer(
    help="Generate many images, score them, and report on their quality and speed.",
    rich_markup_mode="markdown",
)


@eval_app.command()
@panels(
    images="prompts per_prompt classes per_class seed height width negative_prompt",
    sampling="guidance_scale temperature top_k top_p min_p num_inference_steps decoder_guidance_scale",
    decoding="decoding order",
    run="out batch_size engine workers dry_run",
)
def generate(
    out: Annotated[Path, output("Output folder. An interrupted run in it is resumed.")],
    prompts: Prompts = None,
    per_prompt: PerPrompt = 1,
    classes: Classes = None,
    per_class: PerClass = 1,
    model: Model = DEFAULT_MODEL,
    decoding: Decoding = None,
    seed: Seed = 0,
    batch_size: BatchSize = 16,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    num_inference_steps: NumInferenceSteps = None,
    decoder_guidance_scale: DecoderGuidanceScale = None,
    negative_prompt: NegativePrompt = None,
    order: OrderOption = None,
    height: Pixels = None,
    width: Pixels = None,
    lora: Loras = None,
    dtype: Dtype = "auto",
    device: Device = None,
    compile_steps: CompileSteps = False,
    eager: Eager = False,
    engine: Annotated[
        Literal["processes", "ray"],
        typer.Option(help="processes: this one, or those that torchrun or accelerate start. ray: workers of Ray."),
    ] = "processes",
    workers: Annotated[
        int | None, number("Workers of --engine ray. Default: one per GPU, or one without a GPU.", most=10**4)
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Generate many images from prompts or classes. Repeat an interrupted command to resume it: the images do not
    depend on interruptions or on the number of processes."""
    if engine == "ray" and importlib.util.find_spec("ray") is None:
        raise ValueError("--engine ray needs Ray: pip install 'arimage[ray]'")
    if engine == "ray" and lora:
        raise ValueError("--engine ray takes no --lora: leave out one of the two")
    steps = steps_of(compile_steps, eager)
    from .runs.manifest import make_manifest

    rows, source = make_manifest(prompts, per_prompt, classes, per_class, seed)

    from .runs.generate import generate_by_processes, join_processes, make_config

    state = join_processes(device)
    if state.num_processes > 1 and device is None:
        device = str(state.device)
    pipe = load_pipeline(model, device, dtype, videos=True, lora=lora, steps=steps)
    decoder = num_inference_steps, decoder_guidance_scale
    options = sampling_options(guidance_scale, temperature, top_k, top_p, min_p, *decoder)
    config = make_config(
        pipe,
        rows,
        model=model,
        source=source,
        seed=seed,
        batch_size=batch_size,
        decoding=decoding,
        sampling=supported(pipe, model, options),
        height=height,
        width=width,
        negative_prompt=negative_prompt,
        order=order,
        lora=lora,
        steps=steps,
    )
    if dry_run:
        import torch

        from .runs.estimate import dry_run as estimate

        processes = state.num_processes if engine == "processes" else workers or torch.cuda.device_count() or 1
        if state.is_main_process:
            typer.echo(estimate(pipe, config, rows, out, processes))
        return
    if engine == "ray":
        import gc

        import torch

        from .runs.ray_engine import generate_by_ray

        # The device is for the workers.
        del pipe
        gc.collect()
        torch.cuda.empty_cache()
        generate_by_ray(config, rows, out, device, workers, steps)
    else:
        generate_by_processes(pipe, config, rows, out, state)
    if state.is_main_process:
        typer.echo(out)


eval_app.command()(score)
eval_app.command("make-stats")(make_stats)
eval_app.command("tokenizer")(score_tokenizer)


@eval_app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a finished `arimage eval generate`.")],
    format: Annotated[
        Literal["adm-npz", "geneval", "dpg", "wise", "t2i-compbench", "result-jsonl"],
        typer.Option(
            help="The file layout of ADM's evaluator (ImageNet's FID, sFID, IS, precision, recall), GenEval, "
            "DPG-Bench, WISE, T2I-CompBench, or LlamaGen's text-to-image runs."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output file of adm-npz, output folder of the others; it must not exist.")],
    size: Annotated[
        int | None,
        number("With adm-npz: resize to this side in pixels, as LlamaGen does from 384 to 256.", most=2**13),
    ] = None,
) -> None:
    """Write the images of a run in the file layout of another scorer."""
    check_output("--out", out, (".npz",) if format == "adm-npz" else None)

    from .runs.export import export as export_run

    export_run(run, format, out, size)
    typer.echo(out)


# `arimage reproduce`.
@panels(
    figure="protocol decoding allow_lossy images seed",
    files="out model prompts ref inception_weights",
    dry_run="dry_run bandwidth teraflops",
)
def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Name of a model with a published figure. Default: list them all.")
    ] = None,
    protocol: Annotated[str | None, typer.Option(help="Which figure, for models with several.")] = None,
    out: Annotated[Path | None, output("Output folder. An interrupted run in it is resumed.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print images, settings, passes and hours only.")] = False,
    images: Annotated[
        int | None,
        number("Generate fewer images than the published figure used; the FID is then not judged.", most=LARGEST),
    ] = None,
    decoding: Annotated[
        str | None, typer.Option(callback=check_decodings, help="An exact decoding in place of the authors'.")
    ] = None,
    allow_lossy: Annotated[bool, typer.Option("--allow-lossy", help="Also take a lossy --decoding.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder of the weights, for models that cannot be downloaded by name.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help="Prompts of GenEval or DPG-Bench.")] = None,
    ref: Annotated[
        Path | None, typer.Option(help="Reference of an ImageNet FID. Default: export the images for ADM's evaluator.")
    ] = None,
    inception_weights: InceptionWeights = None,
    batch_size: BatchSize = 32,
    bandwidth: Annotated[float, number("TB/s of the accelerator's memory, for --dry-run.", least=0.01)] = 3.35,
    teraflops: Annotated[float, number("TFLOP/s of the accelerator, for --dry-run.", least=0.01)] = 400.0,
    seed: Seed = 0,
    device: Device = None,
) -> None:
    """Reproduce a published figure: generate its images with its settings, score or export them, and say whether the
    figure is inside its band. The exit code is 3 if it is outside."""
    from .protocol import describe, find_protocol, load_protocols

    if name is None:
        for row, its in load_protocols().items():
            typer.echo(f"{row}: {', '.join(f'{figure} {value:g}' for figure, value in its.expected.items())}")
        return
    found, row = find_protocol(name, protocol)

    from .reproduce import check_decoding
    from .reproduce import reproduce as run

    chosen = check_decoding(row, decoding, allow_lossy)
    count = row.check_images(images)
    if dry_run:
        typer.echo(describe(found, row, count, chosen, batch_size, bandwidth, teraflops))
        return
    if row.prompts is not None:
        check_extra("scipy")
    if out is None:
        raise ValueError("--out is missing: name a folder for the images and the report")
    if row.folder is not None and model is None:
        raise ValueError(f"{name} cannot be downloaded by name: give --model, a folder of {row.folder}")
    text, outside = run(
        found,
        row,
        out,
        decoding=chosen,
        images=images,
        model=model,
        prompts=prompts,
        reference=ref,
        inception_weights=inception_weights,
        batch_size=batch_size,
        seed=seed,
        device=device,
    )
    # Of several processes one has the report.
    if text:
        typer.echo(text)
    if outside:
        raise typer.Exit(3)


@eval_app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of finished `arimage eval generate`, one per decoding.")],
    baseline: Annotated[str, typer.Option(help="Name of the folder of the run to compare with.")],
    out: Annotated[Path, output("Output folder for report.json, report.md and report.png.")],
) -> None:
    """Compare quality and cost of runs that differ only in their decoding."""
    check_extra("matplotlib", "scipy")

    from .report import make_report, write_report

    typer.echo(write_report(make_report(runs, baseline), out))


# `arimage bench`.
@panels(
    images="prompt prompts class_label per_prompt seed height width",
    sampling="guidance_scale temperature top_k top_p min_p num_inference_steps decoder_guidance_scale negative_prompt",
    decoding="decoding order",
    measurement="batch_size metrics ref dry_run",
    output="out against",
)
def bench(
    decoding: Annotated[
        list[str] | None,
        typer.Option(
            callback=check_decodings,
            help="Decoding to measure, with settings if needed: sjd-coupled:window=16,init=left; repeat for more, the "
            "first is the baseline. `arimage decodings` lists them. Default: every one that runs on the model.",
        ),
    ] = None,
    order: Orders = None,
    model: Model = DEFAULT_MODEL,
    lora: Loras = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            callback=check_prompts, help="Prompt; repeat for more. Default: one that the model knows, or a red heart."
        ),
    ] = None,
    prompts: Prompts = None,
    class_label: ClassLabels = None,
    per_prompt: Annotated[
        int | None,
        number(
            "Images per prompt or class. Default: 1 with --prompts, else as many as five calls generate.",
            most=LARGEST,
            names=PER_PROMPT,
        ),
    ] = None,
    seed: Seed = 0,
    height: Pixels = None,
    width: Pixels = None,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    num_inference_steps: NumInferenceSteps = None,
    decoder_guidance_scale: DecoderGuidanceScale = None,
    negative_prompt: NegativePrompt = None,
    batch_size: BatchSize = 1,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: deviation (from the model's distribution) and those of `arimage eval score`, whose "
            "networks are those of ARIMAGE_INCEPTION_WEIGHTS, ARIMAGE_I3D_WEIGHTS, ARIMAGE_CLIP and ARIMAGE_DINOV2; "
            '"" for none. Default: those of installed --prompts, none with other --prompts, else deviation.'
        ),
    ] = None,
    ref: Ref = None,
    dry_run: DryRun = False,
    out: Annotated[
        Path | None,
        output(
            "Output folder for the images and the report; needs arimage[eval]. What an interrupted command generated "
            "in it is kept."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(help="report.json of an earlier `arimage bench --out` to compare with, on the same machine."),
    ] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    compile_steps: CompileSteps = False,
    eager: Eager = False,
) -> None:
    """Compare decodings: forward passes, seconds, memory, exactness and, if asked, the quality of images. They
    generate images of the same prompts and seeds in turn."""
    steps = steps_of(compile_steps, eager)
    if sum(map(bool, (prompt, prompts, class_label))) > 1:
        raise ValueError("--prompt, --prompts and --class-label exclude each other: give one of them")
    if out is not None:
        check_extra("matplotlib")

    from ..pipelines.text.known import examples_of
    from .against import compare, read_report
    from .bench.judge import cannot_judge
    from .job import Job
    from .report import to_markdown, write_report
    from .runs.generate import prepare
    from .runs.manifest import make_manifest
    from .runs.prompts import prompt_metrics
    from .score import check_metrics
    from .turns import bench as measure
    from .turns import configure_runs, estimate, typed_rows

    old = None if against is None else read_report(against)
    if metrics is None:
        names = prompt_metrics(prompts) if prompts else ["deviation"]
    else:
        names = names_in(metrics) if metrics else []
    scores = [name for name in names if name != "deviation"]
    if scores:
        check_extra("scipy")
    job = partial(Job, reference=ref, device=choose_device(device), batch_size=batch_size, **networks())
    check_metrics(job(Path()), scores)
    given = None if prompts is None else make_manifest(prompts, per_prompt or 1, None, 1, seed)

    pipe = load_pipeline(model, device, dtype, videos=True, lora=lora, steps=steps)
    check_classes(pipe, model, class_label)
    reason = cannot_judge(pipe) if "deviation" in names else None
    if reason is not None:
        typer.echo(f"{model}: not compared with the model's distribution, since {reason}", err=True)
    texts = [] if class_label else prompt or examples_of(pipe.known_captions)[:1]
    rows, source = given or typed_rows(pipe, texts, class_labels_of(class_label), per_prompt, batch_size, seed)
    decoder = num_inference_steps, decoder_guidance_scale
    options = sampling_options(guidance_scale, temperature, top_k, top_p, min_p, *decoder)
    configs, left_out = configure_runs(
        pipe,
        rows,
        decoding or [],
        order or (),
        old,
        model=model,
        source=source,
        seed=seed,
        batch_size=min(batch_size, len(rows)),
        sampling=supported(pipe, model, options),
        height=height,
        width=width,
        negative_prompt=negative_prompt,
        lora=lora,
        steps=steps,
    )
    if left_out:
        reasons = "; ".join(f"{name} ({why})" for name, why in left_out.items())
        typer.echo(f"{model}: left out {reasons}", err=True)
    if dry_run:
        typer.echo(estimate(pipe, configs, rows, out))
        return
    with contextlib.ExitStack() as stack:
        folder = out or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = [prepare(config, rows, folder / name) for name, config in configs.items()]
        report = measure(runs, pipe, scores, job, "deviation" in names and reason is None)
    typer.echo(to_markdown(report) if out is None else write_report(report, out))
    if old is not None:
        typer.echo(compare(old, report))
