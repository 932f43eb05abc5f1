"""The pipeline of any checkpoint, by name."""

import json
import os
from pathlib import Path

from huggingface_hub import hf_hub_download

from .convert.published import PUBLISHED, load_published
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


def packaged_models() -> list[str]:
    """Names of the models that are part of the package."""
    return sorted(path.parent.name for path in ASSETS.glob("*/model_index.json"))


def published_models() -> list[str]:
    """Names of the checkpoints that are downloaded and converted at their first use."""
    return [entry.name for entry in PUBLISHED]


class AutoPipeline:
    """Loads the pipeline that a checkpoint names; it has no instances."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> ARImagePipeline:
        """The pipeline of a packaged model ("emoji-llamagen"), of a published checkpoint by its name here
        ("llamagen-c2i-b-256": downloaded and converted once), of a local folder, or of a Hub repository.

        `kwargs` are those of `DiffusionPipeline.from_pretrained`; without a dtype everything is float32.

        Raises:
            ValueError: if the folder or repository is no pipeline of this library.
            OSError: if a checkpoint must be downloaded and cannot be.
        """
        name = str(pretrained_model_name_or_path)
        if name in packaged_models():
            folder = ASSETS / name
        elif name in published_models():
            local = {key: kwargs[key] for key in ("cache_dir", "local_files_only") if key in kwargs}
            folder = load_published(name, **local)
        else:
            folder = name
        class_name = AutoPipeline._class_name(folder, kwargs)
        if class_name not in PIPELINES:
            raise ValueError(
                f"model_index.json of {name} names the class {class_name}: this library loads {', '.join(PIPELINES)}"
            )
        return PIPELINES[class_name].from_pretrained(folder, **kwargs)

    @staticmethod
    def _class_name(folder: str | os.PathLike, kwargs: dict) -> str | None:
        index = Path(folder) / "model_index.json"
        if not Path(folder).is_dir():
            if str(folder).count("/") != 1:
                known = ", ".join([*packaged_models(), *published_models()])
                raise ValueError(f"{folder} is no folder, no Hub repository (owner/name) and none of {known}")
            names = ("cache_dir", "force_download", "local_files_only", "token", "revision")
            options = {name: kwargs[name] for name in names if name in kwargs}
            try:
                index = Path(hf_hub_download(str(folder), index.name, **options))
            except OSError as error:
                raise OSError(f"model_index.json of {folder} cannot be fetched: {error}") from error
        if not index.exists():
            raise ValueError(f"{folder} has no model_index.json: give a folder written by save_pretrained")
        return json.loads(index.read_text()).get("_class_name")
