"""The pipeline of any checkpoint, by name."""

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .families import PIPELINES, converters_of, family_of
from .pipelines.saving.saved_folder import local_folder
from .published.registry import PUBLISHED, find_published, nearest_names
from .settings.installed import installed_models, not_installed
from .settings.schema import read_object


if TYPE_CHECKING:
    from .pipelines.base import ARPipeline

INDEX = "model_index.json"
CONFIG = "config.json"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def packaged_folders() -> dict[str, Path]:
    """The folders of the models that installed distributions hold, by their names."""
    return dict(sorted(installed_models().items()))


def packaged_models(videos: bool = True) -> list[str]:
    """Names of the models that installed distributions hold; without `videos`, of those that generate images."""
    models = packaged_folders().items()
    return [name for name, folder in models if videos or not family_of(_class_name(folder / INDEX)).videos]


def published_models() -> list[str]:
    """Names of the checkpoints that are downloaded and converted on first use."""
    return [entry.name for entry in PUBLISHED]


def find_model(name: str) -> Path | None:
    """The folder of a local or installed model; None for a published checkpoint or a Hub repository, which may have to
    be downloaded. Imports no framework, so that the console command can refuse a wrong name at once.

    Raises:
        ValueError: if the name is unknown or that of several models, there is no such folder, or the folder does not
            hold a pipeline of arimage.
    """
    folder = local_folder(name)
    if folder is None or not (folder / INDEX).is_file():
        if name in installed_models():
            folder = installed_models()[name]
        elif find_published(name):
            return None
        elif folder is not None:
            raise ValueError(f"{name} has no {INDEX}: {_remedy(folder / CONFIG)}")
        elif name.count("/") == 1:
            return None
        else:
            if remedy := not_installed(name):
                raise ValueError(remedy)
            near = nearest_names(name, [*packaged_models(), *published_models()])
            raise ValueError(
                f"{name} is neither a local folder, a Hub repository (owner/name) nor a known model: the nearest are "
                f"{near}, and `arimage models` lists all"
            )
    _class_name(folder / INDEX)
    return folder


def class_names(folder: Path) -> list[str] | None:
    """The names of the classes of the model in a folder; None if it does not name any."""
    from .pipelines.saving.saved_folder import read_index

    index = folder / INDEX
    labels = read_index(index, family_of(_class_name(index))).get("id2label")
    return [labels[str(i)] for i in range(len(labels))] if labels is not None else None


def decodings_of(folder: Path) -> list[str]:
    """The names of the decodings that the model in a folder runs, by its class and components. Loads no weights, and
    so does not know what a setting of a component rules out."""
    from .decoding import decoding_names

    index = read_object(folder / INDEX)
    parts = [name for name, entry in index.items() if isinstance(entry, list) and any(entry)]
    return decoding_names(_pipeline_class(folder / INDEX).traits_with(parts))


class AutoPipeline:
    """Loads the pipeline of any checkpoint; it has no instances."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> "ARPipeline":
        """The pipeline of a local folder, of an installed model ("icons-arpg"), of a published checkpoint by its name
        or Hub id (downloaded and converted once), or of any Hub repository that holds a pipeline of this library. A
        folder with a model_index.json comes first. `arimage models` lists the names.

        `kwargs` are those of `DiffusionPipeline.from_pretrained`, among them `token`, `revision`, `cache_dir`,
        `force_download` and `local_files_only`. `dtype` is a torch.dtype or its name, by default float32.

        Raises:
            ValueError: if there is no such folder, the folder or repository holds no pipeline of this library, or
                `dtype` is not a floating-point dtype.
            OSError: if a checkpoint must be downloaded and cannot be.
            CheckpointError: if the published files are damaged or have changed.
        """
        from .pipelines.text.checks import with_dtype

        # A dtype that is not one is refused before anything is downloaded.
        kwargs = with_dtype(kwargs)
        name = str(pretrained_model_name_or_path)
        folder = find_model(name)
        hub = {key: kwargs[key] for key in HUB_OPTIONS if key in kwargs}
        if folder is None and find_published(name):
            from .published.fetch import load_published

            folder = find_model(str(load_published(name, **hub)))
        pipeline = _pipeline_class(_download_index(name, hub) if folder is None else folder / INDEX)
        return pipeline.from_pretrained(name if folder is None else folder, **kwargs)


def _download_index(name: str, hub: dict) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import RemoteEntryNotFoundError

    from .published.hub import hub_errors

    with hub_errors(name, hub.get("revision")):
        try:
            return Path(hf_hub_download(name, INDEX, **hub))
        except RemoteEntryNotFoundError:
            try:
                config = Path(hf_hub_download(name, CONFIG, **hub))
            except RemoteEntryNotFoundError:
                config = None
    raise ValueError(f"{name} has no {INDEX}: {_remedy(config)}")


def _remedy(config: Path | None) -> str:
    """What to do with a folder or repository that holds no pipeline, by its `config.json`."""
    model_type = read_object(config).get("model_type") if config is not None and config.is_file() else None
    if config is not None and (found := converters_of(config.parent, model_type)):
        first, *others = (converter for _, converter in found)
        alternatives = f" (or {', '.join(other.command.split()[-1] for other in others)})" if others else ""
        return f"convert its folder with `{first.command}{alternatives}`, and give the folder that it writes"
    holds = "" if model_type is None else f"it holds a model of type {model_type!r}; "
    return f"{holds}give a folder written by save_pretrained, or a name that `arimage models` lists"


def _pipeline_class(index: Path) -> "type[ARPipeline]":
    class_name = _class_name(index)
    return getattr(import_module(f".{PIPELINES[class_name]}", __package__), class_name)


def _class_name(index: Path) -> str:
    class_name = read_object(index).get("_class_name")
    # Of the file and the class in it: see `pipelines/saving/saved_folder.py`.
    if isinstance(class_name, list) and len(class_name) == 2:
        class_name = class_name[1]
    if not isinstance(class_name, str) or class_name not in PIPELINES:
        raise ValueError(
            f"{index} names the class {class_name!r}, not one of arimage ({', '.join(PIPELINES)}): load it with the "
            "library that wrote it"
        )
    return class_name
