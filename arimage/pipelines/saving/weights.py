"""Compares the weights in a saved pipeline with what its components expect, before they are loaded."""

import importlib
from pathlib import Path
from typing import Any

import torch

from ...models.mixin import ModelMixin
from ...models.weight_files import check_component, check_present
from .saved_components import class_of, has_weights
from .saved_folder import stored_elsewhere


def check_weights(folder: Path, index: dict, given: dict) -> None:
    """Compare the weights of the components in `folder` with their classes and configurations, but for those of our
    own classes, which do so when they are loaded, and for those that are `given` as arguments of `from_pretrained`.
    `index` is that of `load_config`."""
    for name, entry in index.items():
        kind = None if name.startswith("_") or name in given else class_of(entry)
        if kind is None or not has_weights(kind):
            continue
        check_present(folder / name)
        # diffusers looks for the files of a variant before it loads.
        variant = given.get("variant")
        if variant is not None or not issubclass(kind, ModelMixin):
            check_component(folder / name, kind, variant)


def load_shared(folder: Path, index: dict, given: dict) -> dict[str, Any]:
    """The components of a model that are stored with others, except those that are given. The arguments are
    those of `check_weights`, with a dtype among the given ones."""
    components = {}
    dtypes = given["dtype"] if "dtype" in given else given["torch_dtype"]
    for name, path in stored_elsewhere(folder).items():
        if name in given or name not in index:
            continue
        kind = getattr(importlib.import_module(index[name][0]), index[name][1])
        dtype = dtypes.get(name, dtypes.get("default", torch.float32)) if isinstance(dtypes, dict) else dtypes
        options = {"dtype": dtype} if has_weights(kind) else {}
        check_weights(path.parent, {path.name: index[name]}, {})
        components[name] = kind.from_pretrained(path, **options)
    return components
