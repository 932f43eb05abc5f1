"""The pipeline of any checkpoint, by name."""

import json
import os
from pathlib import Path

from huggingface_hub import hf_hub_download

from .convert.fetch import load_published
from .convert.registry import PUBLISHED
from .pipelines.base import ARImagePipeline
from .pipelines.pipeline_anole import AnolePipeline
from .pipelines.pipeline_emu3 import Emu3Pipeline
from .pipelines.pipeline_janus import JanusPipeline
from .pipelines.pipeline_llamagen import LlamaGenPipeline
from .pipelines.pipeline_lumina_mgpt import LuminaMGPTPipeline
from .pipelines.pipeline_var import VARPipeline


PIPELINES = {
    pipeline.__name__: pipeline
    for pipeline in (
        LlamaGenPipeline,
        VARPipeline,
        JanusPipeline,
        Emu3Pipeline,
        LuminaMGPTPipeline,
        AnolePipeline,
    )
}
ASSETS = Path(__file__).parent / "assets"
INDEX = "model_index.json"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision")
# Far beyond any published transformer.
MAX_LAYERS = 1000


def packaged_models() -> list[str]:
    """Names of the models that are part of the package."""
    return sorted(path.parent.name for path in ASSETS.glob("*/model_index.json"))


def published_models() -> list[str]:
    """Names of the checkpoints that are downloaded and converted on first use."""
    return [entry.name for entry in PUBLISHED]


class AutoPipeline:
    """Loads the pipeline of any checkpoint; it has no instances."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> ARImagePipeline:
        """The pipeline of a local folder, of a packaged model ("emoji-llamagen"), of a published checkpoint by its name
        here ("llamagen-c2i-b-256": downloaded and converted once), or of a Hub repository. A folder with a
        model_index.json comes first.

        `kwargs` are those of `DiffusionPipeline.from_pretrained`. The default dtype is float32.

        Raises:
            ValueError: if the folder or repository holds no pipeline of this library.
            OSError: if a checkpoint must be downloaded and cannot be.
        """
        name = str(pretrained_model_name_or_path)
        folder = Path(name)
        if not (folder / INDEX).is_file():
            if name in packaged_models():
                folder = ASSETS / name
            elif name in published_models():
                folder = load_published(name, **{key: kwargs[key] for key in HUB_OPTIONS if key in kwargs})
        class_name = _class_name(folder, name, kwargs)
        if class_name not in PIPELINES:
            raise ValueError(f"{INDEX} of {name} names the class {class_name!r}; available: {', '.join(PIPELINES)}")
        if folder.is_dir():
            _check_layers(folder)
        return PIPELINES[class_name].from_pretrained(folder if folder.is_dir() else name, **kwargs)


def _class_name(folder: Path, name: str, kwargs: dict) -> str:
    index = folder / INDEX
    if not folder.is_dir():
        if name.count("/") != 1:
            known = ", ".join([*packaged_models(), *published_models()])
            raise ValueError(
                f"{name} is neither a local folder, a Hub repository (owner/name) nor one of {known}; `arimage convert` makes "
                "a folder of other published checkpoints"
            )
        try:
            index = Path(hf_hub_download(name, INDEX, **{key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}))
        except OSError as error:
            raise OSError(f"{INDEX} of {name} cannot be downloaded: {error}") from error
    if not index.is_file():
        raise ValueError(f"{name} has no {INDEX}: give a folder written by save_pretrained")
    class_name = _read_object(index).get("_class_name")
    if not isinstance(class_name, str):
        raise ValueError(f"{index} has the _class_name {class_name!r}: give a folder written by save_pretrained")
    return class_name


def _check_layers(folder: Path) -> None:
    """Refuse a damaged number of layers, which would be built one by one before the weights are compared."""
    for path in sorted(folder.glob("*/config.json")):
        for key, value in _read_object(path).items():
            if key in ("num_layers", "num_hidden_layers") and value not in range(1, MAX_LAYERS + 1):
                raise ValueError(f"{path} has {key} = {value!r}: give a number from 1 to {MAX_LAYERS}")


def _read_object(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): get the file again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not an object: get the file again")
    return value
