"""Reading a published folder: its config.json, its weights in one file or several, and its transformers models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, T5EncoderModel

from ..models.tokenizer_files import load_from_files
from ..models.weight_files import check_config, check_layers
from ..settings.schema import read_object
from .checkpoint import load_original
from .paths import CheckpointError


Model = TypeVar("Model", bound=PreTrainedModel)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


@contextmanager
def damaged_files(source: str | Path, remedy: str = "give an unaltered, complete folder") -> Iterator[None]:
    """Raise a `CheckpointError` for whatever the libraries raise inside: a damaged file can fail in any way. `remedy`
    is what the user can do."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{source} cannot be loaded ({type(error).__name__}: {reason}): {remedy}") from error


def read_json(path: Path) -> dict:
    """The object in a JSON file.

    Raises:
        CheckpointError: if it cannot be read, is not an object, or is the configuration of a model with a number of
            layers that none has.
    """
    try:
        value = read_object(path)
        if path.name == "config.json":
            check_layers(value, path)
        return value
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def read_config(folder: Path, *model_types: str, give: str) -> dict:
    """The config.json of a published folder.

    Raises:
        CheckpointError: if it cannot be read, or its `model_type` is none of these. `give` is the folder to give.
    """
    config = read_json(folder / "config.json")
    if config.get("model_type") not in model_types:
        raise CheckpointError(
            f"config.json of {folder} names the model type {config.get('model_type')!r} where "
            f"{' or '.join(map(repr, model_types))} was expected: give the folder of {give}"
        )
    return config


def load_original_folder(folder: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder in which transformers keeps the weights of a model, in one file or in several with an
    index; see `load_original`.

    Raises:
        CheckpointError: if there are none, or a file cannot be read.
    """
    folder = Path(folder)
    for name in WEIGHTS:
        if (folder / name).is_file():
            return load_original(folder / name, ())
        index = folder / f"{name}.index.json"
        if index.is_file():
            with damaged_files(index):
                files = sorted({folder / file for file in read_json(index)["weight_map"].values()})
            return {key: value for file in files for key, value in load_original(file, ()).items()}
    raise CheckpointError(
        f"{folder} has neither {' nor '.join(WEIGHTS)} nor an index of several files: give a complete folder"
    )


def tensor_names(folder: Path) -> list[str]:
    """The names of the tensors in a folder, from their index or their file; none if there is neither.

    Raises:
        CheckpointError: if it cannot be read.
    """
    index, file = folder / "model.safetensors.index.json", folder / "model.safetensors"
    with damaged_files(folder):
        if index.is_file():
            return list(read_json(index)["weight_map"])
        if not file.is_file():
            return []
        with safe_open(file, "pt") as weights:
            return list(weights.keys())


def load_model(kind: type[Model], folder: Path, **options) -> Model:
    """`kind.from_pretrained(folder)` in the dtype of the files and in evaluation mode. Pickles are not executed.

    Raises:
        CheckpointError: if a file is damaged, or a weight is missing, unknown or of another shape.
    """
    settings = {"local_files_only": True, "weights_only": True, "dtype": "auto", "ignore_mismatched_sizes": True}
    # First without memory, since missing weights would be made up.
    for place in ({"device_map": "meta"}, {}):
        with damaged_files(folder):
            check_config(folder, kind)
            model, found = kind.from_pretrained(folder, output_loading_info=True, **settings, **place, **options)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if found[problem]:
                raise CheckpointError(
                    f"{folder} has {problem.replace('_', ' ')}, {sorted(found[problem])[0]!r} among them: give an "
                    "unaltered, complete folder"
                )
    return model.eval()


def load_t5_encoder(folder: Path, width: int, source: str | Path) -> tuple[PreTrainedTokenizerBase, T5EncoderModel]:
    """The tokenizer and the T5 encoder in a folder, for the model in the file `source`, which reads embeddings of
    `width`.

    Raises:
        CheckpointError: if there is no tokenizer, or the encoder is damaged, of another kind or of another width.
    """
    config = read_json(folder / "config.json")
    if config.get("model_type") != "t5":
        raise CheckpointError(f"{folder} is not a T5 encoder: give the one that {source} was trained with")
    if config.get("d_model") != width:
        raise CheckpointError(
            f"{folder} gives embeddings of width {config.get('d_model')} where {source} takes "
            f"{width}: give the text encoder it was trained with"
        )
    # transformers makes up an empty tokenizer where there are no files.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "spiece.model")):
        raise CheckpointError(
            f"{folder} has neither tokenizer.json nor spiece.model: put the encoder's tokenizer there"
        )
    with damaged_files(folder):
        tokenizer = load_from_files(AutoTokenizer, folder)
    return tokenizer, load_model(T5EncoderModel, folder)
