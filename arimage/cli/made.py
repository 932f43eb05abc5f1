"""How a picture was made: `arimage generate --from PICTURE` reads it, and all that generate pictures write it by
`notes_of`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import __version__
from .options import MODEL_HELP, check_models, parse_lora


if TYPE_CHECKING:
    from ..media.metadata import Metadata

# Settings of a picture that are not options, or whose option has another name.
CONDITIONS = ("prompt", "prompts", "class_label", "class_labels")
OTHERS = (*CONDITIONS, "version", "count", "batch_size", "made_from")


def _defaults(made: "Metadata", model: str | None) -> dict[str, Any]:
    """The defaults of options that a picture gives; for another `model` than its own only those that any takes."""
    settings = made.model_dump(exclude_none=True)
    names = settings.keys() - OTHERS if model in (None, made.model) else {"seed", "negative_prompt"} & settings.keys()
    conditions = made.prompts or made.class_labels or [made]
    return {name: settings[name] for name in names} | {"per_prompt": max(made.count // len(conditions), 1)}


def _fill(context: typer.Context, path: Path | None) -> Path | None:
    """Read the `Metadata` of the picture into `context.obj`; they become the defaults of the other options."""
    if path is None:
        return None
    from ..media.files import read_metadata

    made = read_metadata(f"--from is {path}, which", path)
    context.obj, context.default_map = made, _defaults(made, context.params.get("model"))
    if made.version != __version__:
        typer.echo(f"{path} was made by arimage {made.version}: this version may make another one", err=True)
    return path


def _choose(context: typer.Context, model: str) -> str:
    if context.obj is not None:
        context.default_map = _defaults(context.obj, model)
    return str(check_models(model))


From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        is_eager=True,
        callback=_fill,
        help="Picture or video that arimage wrote: generate it again. Other options replace its settings; another "
        "--model takes its prompt and seed only.",
    ),
]
# These two are read before the other options, in the order of the command line.
Model = Annotated[str, typer.Option(is_eager=True, callback=_choose, help=MODEL_HELP)]


def from_picture(context: typer.Context, name: str) -> bool:
    """Whether an option has its value from the picture of --from."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "DEFAULT_MAP"


def check_inputs(made: "Metadata | None", given: dict[str, Any]) -> None:
    """Refuse to make a picture again without the files that it was made from."""
    missing = [name for name in (made and made.made_from) or [] if not given[name]]
    if missing:
        options = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ValueError(f"the picture of --from was made from other files: give {options} too")


def notes_of(
    pipe, given: dict[str, Any], conditions: list[dict[str, Any]], images: list, seeds: list[int], reads: bool
) -> tuple[list[str], str | None]:
    """The metadata of each image or video, and that of one sheet of all of them, None if its prompts are too long.

    Args:
        given: the settings of the call by the names of `Metadata`, "model", "lora" and "made_from" among them. Those
            that are None or missing are the checkpoint's.
        conditions: the prompt or class of equally many images each.
        reads: whether the call has reference images.
    """
    from ..media.metadata import MAX_CHARACTERS, Metadata, to_text
    from ..pipelines.quantized import dtype_name

    own = {"order": pipe.order, **pipe.generation_config}
    if reads and pipe.reference_guidance_scale is not None:
        own["guidance_scale"] = pipe.reference_guidance_scale
    frames = images[0] if pipe.abilities.generates_video else None
    shown = frames[0] if frames else images[0]
    settings = {name: value for name, value in own.items() if name in Metadata.model_fields}
    settings |= {name: value for name, value in given.items() if value is not None}
    settings |= {
        "model": shared(given["model"]),
        "lora": shared_adapters(given["lora"] or []),
        "dtype": dtype_name(pipe),
        "height": shown.height,
        "width": shown.width,
        "num_frames": frames and len(frames),
        "made_from": given["made_from"] or None,
    }
    each = len(images) // len(conditions)
    texts = [to_text(settings | conditions[i // each] | {"seed": seed}) for i, seed in enumerate(seeds)]
    several = {f"{name}s": [one[name] for one in conditions] for name in conditions[0]}
    condition = several if len(conditions) > 1 else conditions[0]
    sheet = to_text(settings | condition | {"seed": seeds[0], "count": len(images)})
    return texts, sheet if len(sheet.encode()) <= MAX_CHARACTERS else None


def shared_adapters(texts: Iterable[str]) -> list[str] | None:
    """FILE:SCALE of each adapter FILE[:SCALE], as others may see it; None without adapters."""
    return [shared(f"{source}:{scale:g}") for source, scale in map(parse_lora, texts)] or None


def shared(text: str) -> str:
    """The name of a model or an adapter that others may see: of an absolute path, which may hold the name of a user,
    the last part only."""
    return Path(text).name if Path(text).expanduser().is_absolute() else text
