"""The command `arimage generate`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..eval.options import PerPrompt, Prompts
from .made import From, Model, check_inputs, from_picture, notes_of
from .options import (
    DEFAULT_MODEL,
    WRITTEN_IMAGES,
    WRITTEN_VIDEOS,
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
    NegativePrompt,
    NoMetadata,
    NumInferenceSteps,
    OrderOption,
    Pixels,
    Seed,
    Temperature,
    TopK,
    TopP,
    check_classes,
    check_output,
    check_prompts,
    class_labels_of,
    images_of,
    load_pipeline,
    panels,
    sampling_options,
    steps_of,
    supported,
)


if TYPE_CHECKING:
    from ..media.metadata import Metadata

# Per call.
MAX_IMAGES = 10_000
MOST_AT_A_TIME = 64
MAX_COPIES = 1000
OUT_SUFFIXES = tuple(dict.fromkeys(WRITTEN_IMAGES + WRITTEN_VIDEOS))
# Of --trace: those of animations, and all.
FILM_SUFFIXES = (".webp", ".gif")
TRACE_SUFFIXES = tuple(dict.fromkeys(FILM_SUFFIXES + WRITTEN_IMAGES))


@panels(
    image="prompts class_label per_prompt seed height width negative_prompt",
    sampling="guidance_scale temperature top_k top_p min_p num_inference_steps decoder_guidance_scale",
    decoding="decoding order batch_size compile_steps eager",
    editing="image mask_image task",
    video="video num_frames",
    output="out sheet trace no_metadata",
)
def generate(
    context: typer.Context,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            callback=check_prompts, help="One or more prompts, or names of classes for class-conditional models."
        ),
    ] = None,
    prompts: Prompts = None,
    class_label: ClassLabels = None,
    source: From = None,
    model: Model = DEFAULT_MODEL,
    decoding: Decoding = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(
            help="Image to edit, resized to the model's size. For video models: the first frame. For models that read "
            "references: repeat it; with --mask-image the first one is edited."
        ),
    ] = None,
    mask_image: Annotated[
        Path | None,
        typer.Option(
            help="Mask: white where --image is generated again, black where it is kept. "
            "Default: what is transparent in --image is generated again."
        ),
    ] = None,
    video: Annotated[
        Path | None,
        typer.Option(
            help="Video that a video model continues, at its rate: .webp, .gif, or .mp4 with arimage[video]."
        ),
    ] = None,
    num_frames: Annotated[
        int | None, typer.Option(help="Frames of a video, given ones included. Default: the model's.")
    ] = None,
    height: Pixels = None,
    width: Pixels = None,
    num_inference_steps: NumInferenceSteps = None,
    decoder_guidance_scale: DecoderGuidanceScale = None,
    negative_prompt: NegativePrompt = None,
    task: Annotated[
        str | None, typer.Option(help='What a model with several tasks does with --image, as in "canny_pred".')
    ] = None,
    order: OrderOption = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help=f"Images that are generated at a time. Default: all, but at most {MOST_AT_A_TIME}."),
    ] = None,
    per_prompt: PerPrompt = 1,
    seed: Seed = 0,
    guidance_scale: GuidanceScale = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    out: Annotated[
        Path,
        typer.Option(
            help="A folder for one file per image, PROMPT-SEED.png, or a file: of the image, or of several on one "
            "sheet. Of videos: .mp4 (with arimage[video]), .webp or .gif."
        ),
    ] = Path("outputs"),
    sheet: Annotated[
        bool, typer.Option("--sheet", help="Also write one sheet of all images into the folder of --out.")
    ] = False,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="How the first image was decoded: an animation of the steps (.webp or .gif), or an image of the step "
            "that decided each token (.png or .jpg); repeat for both."
        ),
    ] = None,
    no_metadata: NoMetadata = False,
    lora: Loras = None,
    device: Device = None,
    dtype: Dtype = "auto",
    compile_steps: CompileSteps = False,
    eager: Eager = False,
) -> None:
    """Generate images, or videos, and write them to --out. In Python, pipelines take more settings."""
    steps = steps_of(compile_steps, eager)
    made: Metadata | None = None if source is None else context.obj
    texts, labels = _subjects(prompt or [], prompts, class_labels_of(class_label), made)
    # A video may go on without a text.
    continues = video is not None or bool(image)
    if (texts and labels) or not (texts or labels or continues):
        raise ValueError('give prompts, as in `arimage generate "a red heart"`, or --class-label')
    inputs = {"image": image, "mask_image": mask_image, "video": video}
    check_inputs(made, inputs)
    total = per_prompt * max(len(texts or labels), 1)
    if total > MAX_IMAGES:
        raise ValueError(f"--per-prompt makes {total} images: give at most {MAX_IMAGES} images per call")
    is_file = _check_outputs(out, sheet, trace or [])
    condition: dict = {"prompt": texts} if texts else {"class_labels": labels} if labels else {}

    from ..media import files

    opened_images = [_opened("--image", path, files.to_rgba) for path in image or []]
    optional: dict = {
        **sampling_options(
            guidance_scale, temperature, top_k, top_p, min_p, num_inference_steps, decoder_guidance_scale
        ),
        "negative_prompt": negative_prompt,
        "order": order,
        "num_frames": num_frames,
        "task": task,
    }
    chosen = dict(optional)
    if mask_image is not None:
        optional["mask_image"] = _opened("--mask-image", mask_image, files.to_mask)
    if video is not None:
        # Before the model is loaded, which knows at which rate it continues a video.
        optional["video"] = files.read_video("--video", video, count=1)
    if out.suffix.lower() == ".mp4":
        files.check_mp4("--out", out)

    if decoding is not None:
        from ..decoding import decoding_from_text

        # Refuses wrong values before the model is loaded.
        decoding_from_text(decoding)
    pipe = load_pipeline(model, device, dtype, videos=True, continues=True, lora=lora, steps=steps, alone=True)
    check_classes(pipe, model, labels)
    if video is not None and pipe.abilities.accepts("video"):
        optional["video"] = files.read_video("--video", video, pipe.config.fps)
    if image:
        # First, so that a model without either refuses the image.
        optional = images_of(pipe, model, opened_images, mask_image is not None) | optional
        if optional["image"] is opened_images[0] and mask_image is None and pipe.abilities.accepts("mask_image"):
            named = f"there is no --mask-image, and --image {image[0]}"
            optional["mask_image"] = files.transparent_part(named, opened_images[0])
    kind, suffixes = ("videos", WRITTEN_VIDEOS) if pipe.abilities.generates_video else ("images", WRITTEN_IMAGES)
    if is_file and out.suffix.lower() not in suffixes:
        raise ValueError(f"--out is {out}, but {model} generates {kind}: end it in one of {', '.join(suffixes)}")

    import torch

    from ..decoding import decoding_to_text
    from ..media import writing
    from ..media.trace import Trace

    films = [path for path in trace or [] if path.suffix.lower() in FILM_SUFFIXES]
    maps = [path for path in trace or [] if path not in films]
    if maps and pipe.abilities.in_maps:
        raise ValueError(
            f"--trace {maps[0]} has nothing to show where a step decides a whole scale: end it in .webp or .gif"
        )
    recorder = Trace() if trace else None
    at_a_time = batch_size or (made.batch_size if made and made.count == total else MOST_AT_A_TIME)
    # Matrices of the same shape are rounded in the same way, so copies of a picture from a batch give its bits.
    copies = min(at_a_time, MAX_COPIES) if made and total == 1 else 1
    at_a_time = min(at_a_time, total * copies)
    generators = [torch.Generator().manual_seed(seed) for _ in range(copies)]
    # What a picture has and another model does not take is left out.
    optional = {
        name: value
        for name, value in optional.items()
        if pipe.abilities.accepts(name) or not from_picture(context, name)
    }
    output = pipe(
        **condition,
        **supported(pipe, model, optional),
        height=height,
        width=width,
        **{pipe.per_prompt: per_prompt * copies},
        batch_size=at_a_time,
        generator=generators if copies > 1 else generators[0],
        decoding=decoding,
        callback_on_step_end=recorder,
        callback_on_step_end_tensor_inputs=Trace.inputs,
    )
    images, seeds, stats = output[0][:total], output.seeds[:total], output.stats
    notes, note = [None] * len(images), None
    if not no_metadata:
        given = chosen | {
            "model": model,
            "decoding": decoding or decoding_to_text(pipe.decoding),
            "lora": lora,
            "batch_size": at_a_time,
            "made_from": [name for name, file in inputs.items() if file],
        }
        conditions = [{"prompt": text} for text in texts] or [{"class_label": label} for label in labels] or [{}]
        # As `images_of` gives them.
        reads = len(opened_images) > (mask_image is not None)
        notes, note = notes_of(pipe, given, conditions, images, seeds, reads)
    names = texts or [label if isinstance(label, str) else f"class {label}" for label in labels]
    names = names or [(video or (image or [out])[0]).stem]
    rate = pipe.config.fps if pipe.abilities.generates_video else None
    # Only now, so that a refused call leaves no empty folder.
    for folder in (out.parent if is_file else out, *(path.parent for path in trace or [])):
        folder.mkdir(parents=True, exist_ok=True)
    written = [] if is_file else writing.write_files(images, names, seeds, out, rate, notes)
    if is_file or sheet:
        path = out if is_file else writing.free_path(out, "sheet", writing.video_suffix() if rate else ".png")
        written.append(writing.write_grid(images, per_prompt, path, rate, note))
    if recorder is not None:
        title = f"{decoding or decoding_to_text(pipe.decoding)}: {names[0]}"
        _draw_traces(pipe, recorder, images[0], title, films, maps)
        written += trace or []
    for path in written:
        typer.echo(path)
    typer.echo(f"{len(images)} {kind if len(images) > 1 else kind.removesuffix('s')}, {stats.summary}", err=True)


def _subjects(
    prompt: list[str], prompts: str | None, labels: list[int | str], made: "Metadata | None"
) -> tuple[list[str], list[int | str]]:
    """The prompts and the classes that are asked for, or else those of the picture of --from."""
    texts = list(prompt)
    if prompts is not None:
        from ..eval.runs.prompts import prompt_file, read_prompts

        rows = read_prompts(prompt_file(prompts))
        if any("image" in row for row in rows):
            raise ValueError(f"--prompts is {prompts}, which names images: use `arimage eval generate`, or --image")
        texts += [row["prompt"] for row in rows]
    if made is None or texts or labels:
        return texts, labels
    texts = made.prompts or ([made.prompt] if made.prompt else [])
    return texts, made.class_labels or ([] if made.class_label is None else [made.class_label])


def _check_outputs(out: Path, sheet: bool, trace: list[Path]) -> bool:
    """Refuse files that cannot be written. Returns whether --out is a file."""
    is_file = out.suffix.lower() in OUT_SUFFIXES
    check_output("--out", out, OUT_SUFFIXES if is_file or (out.suffix and not out.is_dir()) else None)
    if sheet and is_file:
        raise ValueError(f"--out is {out}, a sheet already: name a folder, or leave out --sheet")
    for path in trace:
        check_output("--trace", path, TRACE_SUFFIXES)
    return is_file


def _opened(option: str, path: Path, read: Callable[[str, Any], Any]) -> Any:
    from ..media import files

    name = f"{option} is {path}, which"
    return read(name, files.open_image(name, path))


def _draw_traces(pipe, recorder, shown, title: str, films: list[Path], maps: list[Path]) -> None:
    """Draw how the first image or video of a call, `shown`, was decoded."""
    import torch

    from ..media.trace import animate, draw_acceptance_map
    from ..media.writing import grid_of

    tokens, decided = recorder.of_image(0)
    first = recorder.call.select(slice(1))
    layout = None if pipe.abilities.in_maps else first.layout

    @torch.no_grad()
    def decode(step: torch.LongTensor) -> torch.Tensor:
        pixels = pipe.preview(first, step)
        return (
            torch.cat(pipe.shown_frames(first, pixels.unbind(2)), dim=3) if pipe.abilities.generates_video else pixels
        )

    for path in films:
        finished = None if pipe.abilities.decodes_quickly else shown
        animate(tokens, decided, layout, decode, title, path, finished)
    if layout is not None:
        background = grid_of(pipe.shown_frames(first, shown), 1) if pipe.abilities.generates_video else shown
        for path in maps:
            draw_acceptance_map(decided, layout, background, title, path)
