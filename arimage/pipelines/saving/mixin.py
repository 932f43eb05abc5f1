"""How pipelines are saved and loaded: components, sampling defaults, decoding, trained captions and a model card."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from huggingface_hub import file_exists, snapshot_download
from huggingface_hub.file_download import repo_folder_name

from ...decoding import Decoding, decoding_to_dict
from ...models.saved_files import check_safe, check_savable, files_in, replace_files, upload
from ...models.weight_files import LOADING, Uninitialised
from ...settings.schema import read_object
from ..family import Family
from ..quantized import check_full_weights
from ..text.checks import with_dtype
from ..text.known import KNOWN_CAPTIONS, KnownCaptions, load_known
from .saved_components import check_entries, load_without_weights
from .saved_folder import CARD, INDEX, SHARED, local_folder, name_files, own_classes, read_index, write_card
from .saved_settings import load_defaults
from .weights import check_weights, load_shared


GENERATION_CONFIG = "generation_config.json"
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision")


class SavingMixin(DiffusionPipeline):
    """The part of `ARPipeline` that saves and loads."""

    # What the family declares; None for a class outside of the package.
    family: ClassVar[Family | None] = None
    # Attributes that are saved with the sampling defaults, like `decoding`.
    _saved_defaults: tuple[str, ...] = ()

    generation_config: dict[str, Any]
    decoding: Decoding
    known_captions: KnownCaptions | None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike,
        safe_serialization: bool = True,
        variant: str | None = None,
        max_shard_size: int | str | None = None,
        push_to_hub: bool = False,
        **hub,
    ) -> None:
        """See `diffusers.DiffusionPipeline.save_pretrained`. What an earlier save wrote into the folder is replaced
        once all is written, but for the weights of other variants; other files in it, and a README.md, stay.

        Raises:
            ValueError: if weights are not those of their component: they are quantised, have adapters, are cast layer
                by layer or offloaded.
            OSError: if the folder cannot be written; it is then as it was.
        """
        check_safe(safe_serialization)
        self.check_without_adapters()
        check_full_weights(self, "save_pretrained")
        for name, part in self.components.items():
            if isinstance(part, torch.nn.Module):
                check_savable(f"the {name}", part)
        folder, save = Path(save_directory), super().save_pretrained
        saved = {name: getattr(self, name) for name in self._saved_defaults}
        config = {**self.generation_config, **saved, "decoding": decoding_to_dict(self.decoding)}

        def write(new: Path) -> None:
            (new / GENERATION_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
            if not (folder / CARD).is_file():
                self._write_card(new, folder.resolve().name)
            if self.known_captions is not None:
                (new / KNOWN_CAPTIONS).write_text(self.known_captions.to_text(), encoding="utf-8")
            save(new, variant=variant, max_shard_size=max_shard_size)

        replace_files(folder, write, _replaced(folder, self.components, variant), INDEX)
        if push_to_hub:
            upload(self, folder, **hub)

    def save_config(self, save_directory: str | os.PathLike, **kwargs) -> None:
        super().save_config(save_directory, **kwargs)
        name_files(Path(save_directory), type(self), self.components)

    def _upload_folder(self, working_dir: str | os.PathLike, repo_id: str, token: str | None = None, **kwargs):
        # diffusers has put its own card into the folder, or the one that the repository has.
        if not file_exists(repo_id, CARD, token=token):
            self._write_card(Path(working_dir), repo_id)
        return super()._upload_folder(working_dir, repo_id, token=token, **kwargs)

    def _write_card(self, folder: Path, name: str) -> None:
        write_card(folder, name, type(self).__name__, *self._card)

    @property
    def _card(self) -> tuple[str, str]:
        """The Hub's name of the task, and an example of a call."""
        if self.num_classes is None:
            return "text-to-image", 'image = pipe("a red heart").images[0]'
        return "unconditional-image-generation", "image = pipe(class_labels=0).images[0]"

    @classmethod
    def load_config(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs) -> dict:
        """The contents of model_index.json, with the modules of our classes."""
        config = super().load_config(pretrained_model_name_or_path, **kwargs)
        return own_classes(config, cls._get_signature_types())

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs):
        # By default, transformers loads in the dtype of the file and diffusers in float32. Here all components share
        # one default.
        kwargs = with_dtype(kwargs)
        local = local_folder(pretrained_model_name_or_path)
        if local is None:
            # By its index, a repository of something else is refused before its weights are downloaded.
            cls.load_config(str(pretrained_model_name_or_path), **_hub_options(kwargs))
        folder = local or Path(cls.download(str(pretrained_model_name_or_path), **kwargs))
        if not (folder / INDEX).is_file():
            raise ValueError(f"{folder} has no {INDEX}: give a folder written by save_pretrained")
        read_index(folder / INDEX, cls.family)
        index = cls.load_config(folder)
        check_entries(folder, index, cls._get_signature_keys(cls)[0] - kwargs.keys(), cls._optional_components)
        with LOADING, Uninitialised():
            kwargs |= load_shared(folder, index, kwargs) if local else {}
            check_weights(folder, index, kwargs)
            kwargs |= load_without_weights(folder, index, kwargs)
            pipe = super().from_pretrained(folder, **kwargs)
        # For a repository its name, not the folder of its snapshot.
        pipe.register_to_config(_name_or_path=str(local or pretrained_model_name_or_path))
        return pipe

    def register_to_config(self, **kwargs) -> None:
        super().register_to_config(**kwargs)
        # `DiffusionPipeline.from_pretrained` ends with this call, and does not load our defaults.
        if "_name_or_path" in kwargs:
            folder = self._saved_folder(str(kwargs["_name_or_path"]))
            if folder is not None:
                self.load_defaults(folder / GENERATION_CONFIG)
                self.known_captions = load_known(folder)

    def load_defaults(self, path: Path) -> None:
        """Load the default arguments of calls from a generation_config.json.

        Raises:
            ValueError: if the file is missing, or a default is not a setting of this pipeline or out of its range.
        """
        load_defaults(self, path)

    def _saved_folder(self, name: str) -> Path | None:
        """The folder that the components were loaded from, by the folder or repository that the user named."""
        if (Path(name) / INDEX).is_file():
            return Path(name)
        # Components passed by the user may come from elsewhere.
        configs = [getattr(part, "config", None) for part in self.components.values()]
        paths = [Path(getattr(config, "_name_or_path", None) or "") for config in configs]
        cached = repo_folder_name(repo_id=name, repo_type="model")
        return next((path.parent for path in paths if cached in path.parts), None)

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs) -> str:
        """Download the files of a Hub repository into the cache and return their folder. Skips code, pickles, weights
        of variants other than `variant`, and components that are passed as arguments (also as None)."""
        weights = "*.safetensors" if kwargs.get("variant") is None else f"*.{kwargs['variant']}*.safetensors"
        given = [f"{name}/*" for name in cls._get_signature_types() if name in kwargs]
        # weights.safetensors has no variant, and weights.fp16.safetensors has one; names of components have no dot.
        return snapshot_download(
            pretrained_model_name,
            allow_patterns=["*.json", weights, "*.txt", "*.model", "*.jinja"],
            ignore_patterns=(["*.*.safetensors"] if kwargs.get("variant") is None else []) + given,
            **_hub_options(kwargs),
        )


def _hub_options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in HUB_OPTIONS if arguments.get(name) is not None}


def _replaced(folder: Path, names: Iterable[str], variant: str | None) -> list[Path]:
    """The files in a folder that a pipeline with the components `names` replaces when it is saved there: those of its
    components, and of the pipeline that was saved there before."""
    named = {*names, *(read_object(folder / INDEX) if (folder / INDEX).is_file() else ())}
    # Not by the names in the file, which may lead elsewhere.
    parts = [path for path in folder.glob("*/") if path.name in named]
    own = [path for name in (SHARED, KNOWN_CAPTIONS) if (path := folder / name).is_file()]
    return own + [file for part in parts for file in files_in(part, variant)]
