"""What the console commands share: common options, the device and dtype, and the pipeline. No heavy imports."""

import importlib.util
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Literal, TypeVar, get_args

import typer

from ..auto import INDEX, AutoPipeline, decodings_of, find_model
from ..decoding.names import PRESETS, Order, check_text, nearest_names, parse_decoding
from ..media.texts import lines_of, read_text
from ..settings.installed import installed_packages
from ..settings.schema import check_encodable, read_object
from .imports import few_imports, no_garbage_collection


DEFAULT_MODEL = "emoji-arpg"
Command = TypeVar("Command", bound=Callable)
# Files that are written.
WRITTEN_IMAGES = (".png", ".jpg", ".jpeg", ".webp")
WRITTEN_VIDEOS = (".mp4", ".webp", ".gif")


def panels(**options: str) -> Callable[[Command], Command]:
    """Let --help of a command show its options in panels: each keyword names a panel and lists the parameters in it.
    The others are among the "Options"."""
    chosen = {name: panel.replace("_", " ").capitalize() for panel, names in options.items() for name in names.split()}

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command)
        # Only by name, so that options with and without a default may come in any order.
        by_name = inspect.Parameter.KEYWORD_ONLY
        parameters = {name: one.replace(kind=by_name) for name, one in signature.parameters.items()}
        for name, panel in chosen.items():
            kind, option = get_args(parameters[name].annotation)
            # Options are shared by commands that have other panels.
            shown = copy(option)
            shown.rich_help_panel = panel
            parameters[name] = parameters[name].replace(annotation=Annotated[kind, shown])
        # typer reads the signature, and shows options in the order of the parameters.
        order = [*(name for name in parameters if name not in chosen), *chosen]
        shown_as = signature.replace(parameters=[parameters[name] for name in order])
        vars(command)["__signature__"] = shown_as
        return command

    return decorate


def check_models(models: str | list[str] | None) -> str | list[str] | None:
    """The value of an option --model, after a check that there are such models, before the frameworks are imported."""
    for name in [models] if isinstance(models, str) else models or []:
        find_model(name)
    return models


def check_decodings(context: typer.Context, texts: str | list[str] | None) -> str | list[str] | None:
    """The value of an option --decoding, after a check of its names, which imports the frameworks only for a misspelt
    one."""
    for text in [texts] if isinstance(texts, str) else texts or []:
        name, model = parse_decoding(text)[0], context.params.get("model")
        if model is not None and name not in PRESETS and nearest_names(name):
            _correct(name, model)
        check_text(text)
    return texts


def _correct(name: str, model: str) -> None:
    """Refuse a misspelt decoding and name the nearest ones that the class of the model runs, if it is on this
    machine."""
    folder = find_model(model)
    if folder is None:
        return
    with few_imports() if _needs_few(model) else nullcontext():
        runs = decodings_of(folder)
    raise ValueError(
        f"unknown decoding {name[:80]!r}: try {', '.join(nearest_names(name, runs) or runs)}, which {model} runs"
    )


def check_prompts(prompts: list[str] | None) -> list[str] | None:
    """The prompts of a command, after a check that each is a text that is not blank."""
    for prompt in prompts or []:
        check_encodable("prompt", prompt)
        if not prompt.strip():
            raise ValueError('the prompt is empty: say what to generate, as in "a red heart"')
    return prompts


def class_labels_of(labels: list[str] | None) -> list[int | str]:
    """The classes of a command, ids as numbers and names as texts."""
    return [int(label) if re.fullmatch(r"-?[0-9]{1,9}", label) else label for label in labels or []]


def check_classes(pipe, model: str, labels: list | None) -> None:
    """Refuse class labels for the pipeline of a `model` without classes."""
    if labels and pipe.num_classes is None:
        what = "videos" if pipe.abilities.generates_video else "from text"
        raise ValueError(f"{model} generates {what}, not classes: leave out --class-label")


def prompt_lines(option: str, file: Path, what: str = "prompts") -> list[str]:
    """The lines of the text file of an option that are not blank; `what` they are, for the error."""
    name = f"{option} is {file}, which"
    prompts = [line for _, line in lines_of(read_text(file, name))]
    if not prompts:
        raise ValueError(f"{name} holds no {what}: write one per line")
    return prompts


def check_orders(orders: list[str] | None) -> list[str] | None:
    """The value of an option --order that may be repeated, after a check of its names."""
    for order in orders or []:
        if order not in get_args(Order):
            raise ValueError(f"--order is {order}: choose among {', '.join(get_args(Order))}")
    return orders


MODEL_HELP = "Name of an installed or published model, a folder, or a Hub id."
ENCODER_HELP = "Model whose image tokenizer encodes: a name or a folder, or the folder of a trained tokenizer."
# Read before the other options, in the order of the command line: a check of these may ask for the model.
Model = Annotated[str, typer.Option(is_eager=True, callback=check_models, help=MODEL_HELP)]
Loras = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        help="FILE[:SCALE]: a LoRA adapter, a .safetensors file, a folder or a Hub repository, at scale 1 by default; "
        "repeat for more. Needs arimage[lora].",
    ),
]
ClassLabels = Annotated[
    list[str] | None,
    typer.Option("--class-label", help="Id or name of a class, for class-conditional models; repeat for more."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, ... Default: a GPU if there is one.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "int8", "float8"],
    typer.Option(
        help="Dtype of the weights. auto: bfloat16 where it is fast (most accelerators, many CPUs), else float32. "
        "int8 and float8: like auto, with the layers of the transformer in 8 bits, which changes images a little."
    ),
]

CompileSteps = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the steps with torch.compile. It takes minutes at first, and pays for many images of wide "
        "language models.",
    ),
]
Eager = Annotated[
    bool,
    typer.Option(
        "--eager", help="Launch the operators of a step one by one. Default on an NVIDIA GPU: as one CUDA graph."
    ),
]
NoMetadata = Annotated[
    bool, typer.Option("--no-metadata", help="Do not write into pictures and videos how they were made.")
]
Steps = Literal["captured", "compiled", "eager"]


def steps_of(compile_steps: bool, eager: bool) -> Steps:
    """How steps run, by the options --compile and --eager."""
    if compile_steps and eager:
        raise ValueError("--compile and --eager exclude each other: give one of the two")
    return "compiled" if compile_steps else "eager" if eager else "captured"


# Weights of 8 bits, by the names of their dtypes in torch.
NARROW = {"int8": "int8", "float8": "float8_e4m3fn"}


def number(help: str, least: float = 1, most: float = 10**6, names: tuple[str, ...] = ()):
    """An option for a number from `least` to `most`; `names` if they are not those of the parameter."""

    def check(option: typer.CallbackParam, value):
        # "nan" is in no range.
        if value is not None and not least <= value <= most:
            raise ValueError(f"{option.opts[0]} is {value}: give a number from {least:,} to {most:,}")
        return value

    return typer.Option(*names, callback=check, help=help)


Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Random seed. The same seed gives the same images.")]
GuidanceScale = Annotated[
    float | None, typer.Option(help="Classifier-free guidance scale; 1 disables it. Default: the checkpoint's.")
]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature, above 0. Default: the checkpoint's.")]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k likeliest tokens; 0 disables it. Default: the checkpoint's.")
]
NegativePrompt = Annotated[str | None, typer.Option(help="What to avoid, for models that take a negative prompt.")]
Pixels = Annotated[int | None, number("In pixels. Default: the model's.", most=2**14)]
BatchSize = Annotated[int, number("Images generated at a time.", most=10**4)]
Decoding = Annotated[
    str | None,
    typer.Option(
        callback=check_decodings,
        help="Name of a decoding, with settings if needed: sjd-lazy:window=64. `arimage decodings` lists them. "
        "Default: the one that the model comes with, with the model's own settings.",
    ),
]
OrderOption = Annotated[
    Order | None,
    typer.Option(
        "--order",
        help="Order of the tokens, for models that generate in any. Default: the model's.",
    ),
]
Orders = Annotated[
    list[str] | None,
    typer.Option(
        "--order",
        callback=check_orders,
        help="As in `arimage generate`; repeat for more: each is combined with every decoding.",
    ),
]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling; 1 disables it. Default: the checkpoint's.")]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Sample from the tokens at least this many times as likely as the likeliest; 0 disables it. Default: the "
        "checkpoint's."
    ),
]
NumInferenceSteps = Annotated[
    int | None,
    typer.Option(
        help="Denoising steps of a diffusion decoder, or passes over continuous tokens. Default: the checkpoint's."
    ),
]
DecoderGuidanceScale = Annotated[
    float | None,
    typer.Option(help="Guidance of a diffusion decoder that has one besides the tokens'. Default: the checkpoint's."),
]


def output(help: str, *suffixes: str):
    """An option for a file that is written, whose name ends in one of `suffixes`, or without these for a folder. Its
    value is checked before the frameworks are imported."""

    def check(option: typer.CallbackParam, path: Path | None) -> Path | None:
        if path is not None:
            check_output(option.opts[0], path, suffixes or None)
        return path

    return typer.Option(callback=check, help=help)


def parse_lora(text: str) -> tuple[str, float]:
    """The source of an adapter and its scale, from FILE[:SCALE]."""
    source, colon, scale = text.rpartition(":")
    if not colon or Path(text).exists():
        return text, 1.0
    try:
        number = float(scale)
    except ValueError:
        # A path may hold a colon, as those of Windows do.
        return text, 1.0
    if not math.isfinite(number):
        raise ValueError(f"--lora is {text}, whose scale is not finite: give a number, as in {source}:0.8")
    return source, number


def adapter_text(text: str) -> str:
    """NAME:SCALE of an adapter, from FILE[:SCALE]."""
    source, scale = parse_lora(text)
    return f"{Path(source).name}:{scale:g}"


def check_loras(texts: list[str]) -> None:
    """Check the values of an option --lora: their scales, their files, and that peft is installed."""
    for text in texts:
        source, _ = parse_lora(text)
        if not source:
            raise ValueError("--lora is empty: give a file, a folder or a Hub repository")
        path = Path(source).expanduser()
        if not path.exists() and (path.suffix == ".safetensors" or source.count("/") != 1):
            raise ValueError(f"--lora is {text}: {source} is neither a file, a folder nor a Hub repository")
    if texts and importlib.util.find_spec("peft") is None:
        raise ValueError("--lora needs peft: pip install 'arimage[lora]'")


def load_loras(pipe, loras: list[str], named: Mapping[str, str] | None = None) -> None:
    """Load adapters into a pipeline: `loras`, called "default_0", "default_1", ..., all of them active, each at its
    scale, and `named` ones, none of them active."""
    for name, text in (named or {}).items():
        pipe.load_lora_weights(parse_lora(text)[0], adapter_name=name)
    names = []
    for text in loras:
        before = set(pipe.get_active_adapters())
        pipe.load_lora_weights(parse_lora(text)[0])
        names += [name for name in pipe.get_active_adapters() if name not in before]
    pipe.set_adapters(names, [parse_lora(text)[1] for text in loras])


def check_output(option: str, path: Path, suffixes: tuple[str, ...] | None) -> None:
    """Check that a file or folder can be written, without writing anything. Missing folders above it are fine.

    Args:
        suffixes: what the file may end in; None for a folder.
    """
    if suffixes is not None and path.suffix.lower() not in suffixes:
        raise ValueError(f"{option} is {path}: end it in one of {', '.join(suffixes)}")
    if path.exists() and path.is_dir() != (suffixes is None):
        raise ValueError(f"{option} is {path}, which is a {'folder' if path.is_dir() else 'file'}: give another path")
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    if existing != path and not existing.is_dir():
        raise ValueError(f"{option} is {path}, but {existing} is not a folder: give another path")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{option} is {path}, but {existing} is not writable: give another path")


def choose_device(name: str | None) -> str:
    """The device of that name; without a name, a GPU if there is one, else the CPU.

    Raises:
        ValueError: if the device cannot be used here.
    """
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        if torch.empty(0, device=name).is_meta:
            raise ValueError(f"--device is {name}, which holds no data: try cpu")
    # torch and its backends raise different exceptions for a device that is not there.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device is {name}, which is not available ({_first_line(error)}): try cpu") from error
    return name


def fast_dtype(device: str):
    """bfloat16 where the hardware multiplies it faster than float32 (accelerators but older ones that emulate it, as
    NVIDIA's T4 and V100; CPUs with AMX or AVX-512 BF16), else float32."""
    import torch

    kind, index = torch.device(device).type, torch.device(device).index
    if kind == "cuda":
        # It answers for the current device.
        with nullcontext() if index is None else torch.cuda.device(index):
            fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif kind == "cpu":
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    else:
        fast = True
    return torch.bfloat16 if fast else torch.float32


def _needs_few(model: str) -> bool:
    """Whether a model needs nothing of transformers but tokenizers and T5, and all of it is on this machine."""
    folder = find_model(model)
    entries = [] if folder is None else read_object(folder / INDEX).values()
    parts = [entry[1] for entry in entries if isinstance(entry, list) and entry[0] == "transformers"]
    return folder is not None and all(part == "T5EncoderModel" or "Token" in str(part) for part in parts)


def _load(model: str, device: str | None, dtype: str) -> tuple:
    device = choose_device(device)
    import torch
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        pipe = AutoPipeline.from_pretrained(
            model, dtype=fast_dtype(device) if dtype in ("auto", *NARROW) else getattr(torch, dtype)
        )
    # torch, diffusers and transformers raise exceptions of any class for damaged files and settings of a wrong type.
    except Exception as error:
        if isinstance(error, OSError) or out_of_memory(error) or raised_by_arimage(error):
            raise
        raise ValueError(
            f"{model} cannot be loaded ({type(error).__name__}: {_first_line(error)}): get its files again, or set "
            "ARIMAGE_TRACEBACK=1 to see where it fails"
        ) from error
    return pipe, device


@no_garbage_collection()
def load_pipeline(
    model: str,
    device: str | None,
    dtype: str = "auto",
    videos: bool = False,
    continues: bool = False,
    lora: list[str] | None = None,
    steps: Steps = "captured",
    named_loras: Mapping[str, str] | None = None,
    alone: bool = False,
):
    """`AutoPipeline.from_pretrained(model)` on `choose_device(device)`, with progress bars only in a terminal.

    Args:
        dtype: "float32", "bfloat16", "float16", or "auto", the `fast_dtype` of the device; "int8" or "float8" for
            that with `quantize_weights`.
        videos: whether the command takes models of videos too.
        continues: whether it takes those that only continue an image or a video.
        lora: adapters that are active, each FILE[:SCALE].
        named_loras: others, by name.
        steps: how steps run; "captured" leaves it to the pipeline.
        alone: whether the process does nothing but call the pipeline: see `few_imports`.

    Raises:
        ValueError: if the device cannot be used, the files of the model are damaged, or it generates videos where the
            command takes none.
    """
    loras = [*(lora or []), *(named_loras or {}).values()]
    check_loras(loras)
    if loras and dtype in NARROW:
        raise ValueError(f"--lora changes full weights, and --dtype is {dtype}: leave one of them out")
    brief = alone and not loras and steps != "compiled" and _needs_few(model)
    with few_imports() if brief else nullcontext():
        pipe, device = _load(model, device, dtype)
    if pipe.abilities.generates_video and not videos:
        raise ValueError(f"{model} generates videos, which this command does not take: use `arimage generate`")
    if pipe.abilities.generates_video and not (continues or pipe.begins_with_text):
        raise ValueError(
            f"{model} continues images or videos, which this command does not give: use `arimage generate`"
        )
    pipe.set_progress_bar_config(disable=not sys.stderr.isatty())
    if dtype in NARROW:
        # Before they are moved: the device never holds the full weights.
        import torch

        pipe.quantize_weights(getattr(torch, NARROW[dtype]))
    pipe.to(device)
    if loras:
        load_loras(pipe, lora or [], named_loras)
    if steps == "compiled":
        pipe.compile()
    elif steps == "eager":
        pipe.run_eagerly()
    return pipe


def sampling_options(guidance_scale, temperature, top_k, top_p, min_p, *decoder: float | None) -> dict:
    """The arguments of a call that `Sampling` has, and num_inference_steps and decoder_guidance_scale where they are
    given; None where the checkpoint decides."""
    return {
        "guidance_scale": guidance_scale,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        **dict(zip(("num_inference_steps", "decoder_guidance_scale"), decoder, strict=False)),
    }


def images_of(pipe, model: str, images: list, with_mask: bool) -> dict:
    """The arguments of a call of the pipeline of `model` for the given images: references, or with a mask or a model
    that reads none, an image to edit and references after it."""
    edited = with_mask or not pipe.abilities.max_references
    references = images[1:] if edited else images
    most = pipe.abilities.max_references
    if len(references) > most:
        raise ValueError(f"{model} reads {most or 'no'} reference images, not {len(references)}: give fewer --image")
    if not edited:
        return {"image": references}
    return {"image": images[0], "image_reference": references or None}


def supported(pipe, model: str, arguments: dict) -> dict:
    """The `arguments` that are given, not None, of a call of the pipeline of `model`."""
    given = {name: value for name, value in arguments.items() if value is not None}
    for name in given:
        if not pipe.abilities.accepts(name):
            raise ValueError(f"{model} takes no {name}: leave out --{name.replace('_', '-')}")
    return given


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had too little memory: torch has no class of its own for that of a CPU."""
    words = ("out of memory", "not enough memory", "can't allocate memory")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(part in str(error).lower() for part in words)
    )


def raised_by_arimage(error: Exception) -> bool:
    """Whether this package, or one that adds to it, raised it on purpose. What others raise may be a bug."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return frame.f_globals["__name__"].partition(".")[0] in ("arimage", *installed_packages())
