"""The classes of the components in a saved pipeline, and the components without weights, such as tokenizers. What the
libraries raise for their files becomes one sentence that names them."""

import importlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusers import ModelMixin
from transformers import PreTrainedModel

from ...models.tokenizer_files import load_from_files
from .saved_folder import INDEX, PACKAGE


# Our components and the tokenizers and schedulers of these libraries are loaded here, all others by diffusers.
LIBRARIES = ("diffusers", "transformers")


def check_entries(folder: Path, index: dict, names: Iterable[str], optional: Iterable[str]) -> None:
    """Check that a model_index.json names a class for each of the components `names`, or null for one without; those
    that are `optional` may be missing."""
    for name in names:
        if name not in index and name not in optional:
            raise ValueError(f"{folder / INDEX} does not name the class of {name}: get the file again")
        entry = index.get(name, [None, None])
        if entry == [None, None] and name in optional:
            continue
        where = f"{folder / INDEX}: {name} is {entry!r}"
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
            raise ValueError(f"{where}: give the library and the class of the component, or get the file again")
        try:
            found = importlib.util.find_spec(entry[0]) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise ValueError(
                f"{where}, but the module {entry[0]!r} is not installed: install it, or get the file again"
            )


def class_of(entry: object) -> type | None:
    """The class of a component; None for what is not one, or belongs to a library that pipelines do not use."""
    if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, str) for part in entry):
        return None
    library, name = entry
    if library not in LIBRARIES and not library.startswith(f"{PACKAGE}."):
        return None
    kind = getattr(importlib.import_module(library), name, None)
    return kind if isinstance(kind, type) else None


def has_weights(kind: type) -> bool:
    return issubclass(kind, ModelMixin | PreTrainedModel)


def load_without_weights(folder: Path, index: dict, given: dict) -> dict[str, Any]:
    """Load the tokenizers, processors and schedulers of a saved pipeline, except those that are given."""
    return {
        name: _load(folder / name, kind)
        for name, entry in index.items()
        if not name.startswith("_") and name not in given
        if (kind := class_of(entry)) is not None and hasattr(kind, "from_pretrained") and not has_weights(kind)
    }


def _load(folder: Path, kind: Any) -> Any:
    if not folder.is_dir():
        raise ValueError(f"{folder} is missing, the folder of a component in {INDEX}: save the pipeline again")
    return load_from_files(kind, folder)
