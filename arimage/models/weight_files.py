"""The files of a component with weights: compared with what its class expects, before anything is loaded.

diffusers and transformers would fill missing weights with random numbers, drop unexpected ones, or fail with unclear
errors.
"""

import os
import re
import textwrap
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from logging import Filter, LogRecord
from pathlib import Path
from threading import RLock, get_ident
from types import MappingProxyType
from typing import Annotated, Any, Self

import diffusers
import torch
from pydantic import BaseModel, Field, model_validator
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode
from transformers.utils import logging

from ..settings.schema import Count, Flag, Layers, Positive, Text, Width, check, check_regular, read_object
from .saved_files import WEIGHTS


PROBLEMS = {
    "missing_keys": "is missing",
    "unexpected_keys": "is unexpected",
    "mismatched_keys": "has another shape than config.json says",
}
# The loading state of transformers is global to the process.
LOADING = RLock()


Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _OfOtherThreads(Filter):
    """Passes only log records of other threads."""

    def __init__(self):
        super().__init__()
        self._thread = get_ident()

    def filter(self, record: LogRecord) -> bool:
        return record.thread != self._thread


class Depth(BaseModel):
    """The number of layers in a config, checked first because layers are built before the weights are compared."""

    num_layers: Layers = 1
    num_hidden_layers: Layers = 1
    num_decoder_layers: Layers | None = None
    # Of the vision towers of language models, and of the VAEs of diffusers.
    depth: Layers = 1
    layers_per_block: Layers | list[Layers] = 1

    @property
    def most(self) -> int:
        """The largest of them."""
        per_block = self.layers_per_block if isinstance(self.layers_per_block, list) else [self.layers_per_block]
        others = (self.num_layers, self.num_hidden_layers, self.num_decoder_layers or 1, self.depth)
        return max(*others, *per_block)


class T5Settings(BaseModel):
    """Settings of T5 that its constructor takes, and that fail where a text is read."""

    relative_attention_num_buckets: Annotated[int, Field(strict=True, ge=4, le=10**6)] = 32
    relative_attention_max_distance: Count = 128

    @model_validator(mode="after")
    def _are_distances(self) -> Self:
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 4:
            raise ValueError("relative_attention_max_distance is too small for relative_attention_num_buckets")
        return self


class AutoencoderSettings(BaseModel):
    """The same of diffusers' image tokenizers."""

    latent_channels: Width = 4
    norm_num_groups: Count = 32
    scaling_factor: Positive | None = None
    shift_factor: Real | None = None
    lookup_from_codebook: Flag = False
    latents_mean: list[Real] | None = None
    latents_std: list[Real] | None = None

    @model_validator(mode="after")
    def _are_per_channel(self) -> Self:
        for name in ("latents_mean", "latents_std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.latent_channels:
                raise ValueError(f"{name} has {len(values)} numbers for {self.latent_channels} latent_channels")
        return self


class WeightIndex(BaseModel):
    """The index of weights in several files."""

    weight_map: dict[str, Text] = {}


# By the names of base classes.
SETTINGS = {
    "T5PreTrainedModel": T5Settings,
    "AutoencoderKL": AutoencoderSettings,
    "VQModel": AutoencoderSettings,
}


class Uninitialised(TorchFunctionMode):
    """While models are made in this thread, initialises no weight on the meta device, where there is nothing to write:
    torch would import a system of algebra for it."""

    _FUNCTIONS = frozenset(name for name in dir(torch.nn.init) if name.endswith("_"))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        tensor: Any = args[0] if args else (kwargs or {}).get("tensor")
        if getattr(func, "__name__", "") in self._FUNCTIONS and isinstance(tensor, torch.Tensor) and tensor.is_meta:
            return tensor
        return func(*args, **(kwargs or {}))


def one_line(error: BaseException) -> str:
    """The message of a library, shortened."""
    return textwrap.shorten(str(error), 300)


def check_present(folder: Path) -> None:
    """Raise a `ValueError` if the folder of a component is missing."""
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is missing, the folder of a component in model_index.json: save the pipeline again"
        )


def check_layers(config: dict, path: Path) -> int:
    """The largest number of layers in a configuration and the tables in it. A `ValueError` if one is out of range."""
    parts = [config, *filter(lambda value: isinstance(value, dict), config.values())]
    return max(check(Depth, part, path).most for part in parts)


def check_config(folder: Path, kind: type) -> tuple[dict, int]:
    """The configuration of a component, and the largest number of layers in it, before the component is built. A
    `ValueError` if it cannot be read, or a setting is out of its range."""
    path = folder / "config.json"
    config = read_object(path)
    layers = check_layers(config, path)
    fields = (SETTINGS[base.__name__] for base in kind.__mro__ if base.__name__ in SETTINGS)
    check(next(fields, BaseModel), config, path)
    return config, layers


def check_component(folder: Path, kind: type, variant: str | None = None) -> None:
    """Compare the weights in `folder` with their class and configuration.

    Args:
        folder: the folder of one component, written by its `save_pretrained`.
        kind: its class, one of diffusers' or transformers' models.
        variant: chooses the files.

    Raises:
        ValueError: if a file is damaged, or a weight is missing, unexpected or of another shape.
    """
    check_present(folder)
    config, deepest = check_config(folder, kind)
    if (generation := folder / "generation_config.json").is_file():
        # transformers does without it if it cannot be read.
        read_object(generation)
    if "quantization_config" in config:
        # Quantised weights have other names and shapes, which only the library that packed them knows.
        return
    files, variant = _weight_files(folder, variant)
    shapes = _shapes(files)
    if not shapes:
        raise ValueError(f"{folder} holds no weights in .safetensors files: save the pipeline again")
    if deepest > len(shapes):
        raise ValueError(
            f"{folder / 'config.json'} names {deepest} layers, more than there are weights ({len(shapes)}): correct "
            "it, or save the component again"
        )
    try:
        if issubclass(kind, diffusers.ModelMixin):
            found = _compare(kind, config, shapes)
        else:
            found = _load_on_meta(kind, folder, variant)
    # What a constructor raises for settings of wrong types may be of any class.
    except Exception as error:
        raise ValueError(
            f"{folder / 'config.json'} does not describe a {kind.__name__} ({one_line(error)}): correct it, or save "
            "the component again"
        ) from error
    check_found(found, folder, {key: file for key, (file, _) in shapes.items()})


def check_found(
    found: Mapping[str, Iterable], source: str | os.PathLike, files: Mapping[str, Path] = MappingProxyType({})
) -> None:
    """Raise a `ValueError` if diffusers or transformers `found` a weight missing, unexpected or of another shape.

    Args:
        found: what `from_pretrained` returns with `output_loading_info`.
        source: the folder or repository of the component.
        files: the file of each weight, as far as it is known.
    """
    for problem, words in PROBLEMS.items():
        for key in sorted(entry[0] if isinstance(entry, tuple) else entry for entry in found[problem]):
            raise ValueError(f"{files.get(key, source)}: the weight {key!r} {words}: save the component again")


def _weight_files(folder: Path, variant: str | None) -> tuple[list[Path], str | None]:
    """The files with the weights of a component, and their variant; if that variant does not exist, the files without
    one."""
    found: dict[str | None, list[Path]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        # Others, such as adapters, are not loaded.
        if (name := WEIGHTS.fullmatch(file.name)) is not None:
            found.setdefault(name[1], []).append(file)
    variant = variant if variant in found else None
    if found and variant not in found:
        other = min(filter(None, found))
        raise ValueError(
            f"{folder} holds weights of the variant {other!r} only: give variant={other!r} to from_pretrained, or "
            "save the pipeline without a variant"
        )
    files = found.get(variant, [])
    # Without an index the libraries do not load shards.
    shards = [file for file in files if re.search(r"-\d{5}-of-\d{5}", file.name)]
    if shards and shards == files:
        stem = re.split(r"[.-]", shards[0].name)[0]
        index = folder / f"{stem}.safetensors.index.{f'{variant}.' if variant else ''}json"
        if not index.is_file():
            raise ValueError(
                f"{folder} holds {shards[0].name} but not {index.name}: get all files, or save the pipeline again"
            )
        names = set(check(WeightIndex, read_object(index), index).weight_map.values())
        for name in sorted(names - {file.name for file in shards}):
            raise ValueError(
                f"{folder / name} is missing, which {index.name} names: get all files, or save the pipeline again"
            )
    return files, variant


def _shapes(files: list[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """The file and shape of every weight, by its name."""
    shapes = {}
    for file in files:
        check_regular(str(file), file, None)
        try:
            with safe_open(file, "pt") as weights:
                shapes |= {key: (file, tuple(weights.get_slice(key).get_shape())) for key in weights.keys()}
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}): download it or save the pipeline again") from error
    return shapes


def _compare(kind: type, config: dict, shapes: dict) -> dict[str, set[str]]:
    with torch.device("meta"), Uninitialised():
        expected = {key: tuple(value.shape) for key, value in kind.from_config(config).state_dict().items()}
    return {
        "missing_keys": expected.keys() - shapes.keys(),
        "unexpected_keys": shapes.keys() - expected.keys(),
        "mismatched_keys": {key for key in expected.keys() & shapes.keys() if expected[key] != shapes[key][1]},
    }


def _load_on_meta(kind: type, folder: Path, variant: str | None) -> dict[str, set]:
    # Names in files may differ from those in modules, and weights may be tied: transformers handles both.
    with quiet():
        _, found = kind.from_pretrained(
            folder,
            variant=variant,
            device_map="meta",
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    return found


@contextmanager
def quiet():
    """Suppress transformers' progress bars, and its reports about what this thread loads."""
    logger, own = logging.get_logger("transformers.modeling_utils"), _OfOtherThreads()
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logger.addFilter(own)
    try:
        yield
    finally:
        logger.removeFilter(own)
        if bars:
            logging.enable_progress_bar()
