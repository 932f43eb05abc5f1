"""The pipeline of any checkpoint, by name."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .convert.registry import PUBLISHED


if TYPE_CHECKING:
    from .pipelines.base import ARImagePipeline

# Names of modules: a model's family is imported once its index names it.
PIPELINES = {
    "LlamaGenPipeline": "pipeline_llamagen",
    "VARPipeline": "pipeline_var",
    "JanusPipeline": "pipeline_janus",
    "Emu3Pipeline": "pipeline_emu3",
    "LuminaMGPTPipeline": "pipeline_lumina_mgpt",
    "AnolePipeline": "pipeline_anole",
    "ARPGPipeline": "pipeline_arpg",
    "LPDPipeline": "pipeline_lpd",
    "RandARPipeline": "pipeline_randar",
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


def find_model(name: str) -> Path | None:
    """The folder of a local or packaged model; None for a published checkpoint or a Hub repository, which may have to be
    downloaded. Imports no framework, so that the console command can refuse a wrong name at once.

    Raises:
        ValueError: if the name is unknown, or the folder does not hold a pipeline of arimage.
    """
    folder = Path(name)
    if not (folder / INDEX).is_file():
        if name in packaged_models():
            folder = ASSETS / name
        elif name in published_models():
            return None
        elif folder.is_dir():
            raise ValueError(f"{name} has no {INDEX}: give a folder written by save_pretrained")
        elif name.count("/") == 1:
            return None
        else:
            known = ", ".join([*packaged_models(), *published_models()])
            raise ValueError(
                f"{name} is neither a local folder, a Hub repository (owner/name) nor one of {known}; `arimage convert` makes "
                "a folder of other published checkpoints"
            )
    _class_name(folder / INDEX)
    _check_layers(folder)
    return folder


class AutoPipeline:
    """Loads the pipeline of any checkpoint; it has no instances."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> "ARImagePipeline":
        """The pipeline of a local folder, of a packaged model ("emoji-llamagen"), of a published checkpoint by its name
        here ("llamagen-c2i-b-256": downloaded and converted once), or of a Hub repository. A folder with a
        model_index.json comes first.

        `kwargs` are those of `DiffusionPipeline.from_pretrained`. The default dtype is float32.

        Raises:
            ValueError: if the folder or repository holds no pipeline of this library.
            OSError: if a checkpoint must be downloaded and cannot be.
        """
        name = str(pretrained_model_name_or_path)
        folder = find_model(name)
        hub = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        if folder is None and name in published_models():
            from .convert.fetch import load_published

            folder = find_model(str(load_published(name, **hub)))
        class_name = _class_name(_download_index(name, hub) if folder is None else folder / INDEX)
        module = import_module(f".pipelines.{PIPELINES[class_name]}", __package__)
        return getattr(module, class_name).from_pretrained(name if folder is None else folder, **kwargs)


def _download_index(name: str, hub: dict) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, INDEX, **hub))
    except OSError as error:
        raise OSError(f"{INDEX} of {name} cannot be downloaded: {error}") from error


def _class_name(index: Path) -> str:
    class_name = _read_object(index).get("_class_name")
    if not isinstance(class_name, str) or class_name not in PIPELINES:
        raise ValueError(f"{index} names the class {class_name!r}; available: {', '.join(PIPELINES)}")
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
