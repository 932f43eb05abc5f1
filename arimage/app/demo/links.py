"""Links to images: the settings of a request as the query of the demo's address, or in a picture."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from ...media.files import read_metadata
from ..engine.engine import Engine
from ..engine.types import SAMPLING, Refused, Request, Result
from .controls import chosen, refusal


# The fields of a request in a link, and their types.
READ = {
    "model": str,
    "prompt": str,
    "negative_prompt": str,
    "class_label": int,
    "height": int,
    "width": int,
    "count": int,
    "seed": int,
    "decoding": str,
    "order": str,
    "num_inference_steps": int,
    "decoder_guidance_scale": float,
    **dict.fromkeys(SAMPLING, float),
    "top_k": int,
}


# How many references the images had, which no link holds.
REFERENCES = "references"


def to_query(request: Request, result: Result, engine: Engine) -> str:
    """The query that generates the images of a request again. The model's default settings are left out, except its
    decoding, which may change."""
    info = engine.models[result.settings["model"]]
    defaults = {"count": 1, "order": info.order, **info.sampling}
    settings = {name: result.settings[name] for name in READ if name in result.settings}
    # A size is both.
    if (settings["height"], settings["width"]) == info.sizes[0]:
        del settings["height"], settings["width"]
    settings = {name: value for name, value in settings.items() if value != defaults.get(name)}
    return "?" + urlencode(settings | ({REFERENCES: len(request.references)} if request.references else {}))


def query_of_picture(path: Path, engine: Engine) -> tuple[dict[str, str], list[str]]:
    """The query that generates a picture again, by the metadata in its file, and a sentence about each thing that it
    needs and the demo lacks.

    Raises:
        gr.Error: if it has no metadata or several prompts, or is a video.
    """
    try:
        made = read_metadata("the picture", path)
    except ValueError as error:
        raise refusal(str(error)) from error
    if made.num_frames is not None:
        raise refusal("this is a video: drop a picture, or type its prompt in the tab Video")
    if made.prompts or made.class_labels:
        raise refusal(
            "the picture is a sheet of several prompts, and the form takes one: use `arimage generate --from`"
        )
    query = {name: str(value) for name, value in made.model_dump(exclude_none=True).items() if name in READ}
    if isinstance(made.class_label, str):
        # A request names classes as prompts.
        query["prompt"] = query.pop("class_label")
    lacks, adapters = [], _names(made.lora)
    # A command may have named a folder by its path.
    models = (made.model, Path(made.model).name)
    ours = {name: engine.made_with(name) for name in engine.models}
    here = {name: _names(its["lora"]) for name, its in ours.items() if its["model"] in models}
    others = [name for name, info in engine.models.items() if info.classes is None]
    if here:
        query["model"], has = next((pair for pair in here.items() if pair[1] == adapters), next(iter(here.items())))
        if has != adapters:
            lacks.append(
                f"The dropped picture was made with {adapters}, and the model here has {has}: Generate makes another "
                "one."
            )
    elif "prompt" in query and others:
        query = {"model": others[0], "prompt": query["prompt"], "seed": query["seed"]}
        lacks.append(
            f"The dropped picture was made by {made.model}, which is not here: Generate makes one of its prompt."
        )
    info = engine.models.get(query["model"])
    if made.made_from == ["image"] and info is not None and info.references:
        query[REFERENCES] = ""
    elif made.made_from and here:
        lacks.append("The dropped picture is an edit of another one: load that one in the tab Edit.")
    return query, lacks


def _names(adapters: list[str] | None) -> str:
    """Adapters FILE:SCALE in a sentence, by the names of their files, which may be elsewhere."""
    return f"the adapter {' and '.join(Path(text).name for text in adapters)}" if adapters else "no adapter"


def from_query(query: Mapping[str, str], engine: Engine, what: str = "the link") -> Request | None:
    """The request of a link, or of `what` the query comes from, without its references, or None if it has no settings.

    Raises:
        gr.Error: if a setting cannot be read, the demo does not have the model, or the model cannot generate it.
    """
    settings = {}
    for name, read in READ.items():
        if name in query:
            try:
                settings[name] = read(query[name])
            except ValueError as error:
                raise refusal(f"{what} has {name}={query[name][:80]}: correct the number, or leave it out") from error
    if not settings:
        return None
    model = settings.setdefault("model", next(iter(engine.models)))
    if model not in engine.models:
        raise refusal(f"{what} asks for the model {model[:80]}: choose among {', '.join(engine.models)}")
    if "decoding" in settings:
        settings["decoding"] = chosen(engine.models[model], settings["decoding"])
    request = Request(**settings)
    # Before the form is filled: its controls cannot hold any value.
    try:
        return engine.check(request)[0]
    except Refused as error:
        raise refusal(f"{what} asks for an image that cannot be generated: {error}") from error
