"""The files of a saved folder that let diffusers load it, which does not know our classes.

diffusers takes classes from itself, from transformers and, with `trust_remote_code=True`, from .py files of the
folder. So the folder has one file per class of ours, with one import, and `model_index.json` names these files:
`["pipeline", "XPipeline"]`, `"transformer": ["transformer_x", "XTransformer"]`. Our own loaders read the names and
never run the files. Folders of earlier versions name the modules: `["arimage.models.transformer_x", "XTransformer"]`.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel

from ...settings.schema import Caption, Flag, check, read_object, with_fields
from ..family import Family


INDEX, CARD = "model_index.json", "README.md"
# Of models of one distribution.
SHARED = "shared.json"
PACKAGE = __name__.partition(".")[0]
PIPELINE_FILE = "pipeline"
CARD_TEMPLATE = """---
library_name: arimage
pipeline_tag: {task}
tags:
- diffusers
- autoregressive
---

# {name}

The components of a `{kind}` of arimage: autoregressive generation with diffusers-style pipelines.

```python
from arimage import AutoPipeline

pipe = AutoPipeline.from_pretrained({quoted})
{call}
```

With diffusers, while arimage is installed: each .py file here is one import from it.

```python
from diffusers import DiffusionPipeline

pipe = DiffusionPipeline.from_pretrained({quoted}, trust_remote_code=True)
```
"""


def local_folder(name: str | os.PathLike) -> Path | None:
    """The folder at a path, in which ~ is the home folder; None for a name, such as that of a Hub repository."""
    text = os.fspath(name)
    if not text:
        # It would be the current folder.
        raise ValueError("the name is empty: give a folder, a name that `arimage models` lists or a Hub repository")
    folder = Path(os.path.expanduser(text))
    if folder.is_dir():
        return folder
    if text.startswith((".", "~")) or text.count("/") > 1 or "\\" in text or folder.is_absolute():
        raise ValueError(
            f"{text} is not a folder: check the path, or give a name that `arimage models` lists or a Hub repository "
            "(owner/name)"
        )
    return None


def _numbered(labels: dict[str, str]) -> dict[str, str]:
    if sorted(labels) != sorted(map(str, range(len(labels)))):
        raise ValueError(
            f"it names {len(labels)} classes, but not each id from 0 to {len(labels) - 1}: name each once"
        )
    return labels


class IndexFields(BaseModel):
    """Our fields of model_index.json that several kinds of models have. All others are those of a family, or belong to
    diffusers."""

    id2label: Annotated[dict[str, Caption], AfterValidator(_numbered)] | None = None
    requires_safety_checker: Flag = False


def read_index(path: Path, family: Family | None) -> dict:
    """Read and check a model_index.json, with the fields of a family."""
    index = read_object(path)
    check(IndexFields if family is None else with_fields(IndexFields, family.config), index, path)
    return index


def stored_elsewhere(folder: Path) -> dict[str, Path]:
    """The folders of the components, and of the gallery, that the model in a folder shares with models next to it,
    and that are stored once."""
    shared = read_object(folder / SHARED) if (folder / SHARED).is_file() else {}
    return {name: folder.parent / path for name, path in shared.items()}


def name_files(folder: Path, pipeline: type, components: Mapping[str, object]) -> None:
    """Write the import files into a folder that diffusers has just saved, and name them in its index.

    The classes are those of the components, not those in the index: where a module's folder has the name of one of
    diffusers' pipelines, such as "cosmos", diffusers writes that name.
    """
    index = read_object(folder / INDEX)
    for name, part in components.items():
        kind = type(getattr(part, "_orig_mod", part))
        if kind.__module__.startswith(f"{PACKAGE}."):
            file = kind.__module__.rpartition(".")[2]
            index[name] = [file, kind.__name__]
            _write_import(folder / name, file, kind)
    if pipeline.__module__.startswith(f"{PACKAGE}."):
        index["_class_name"] = [PIPELINE_FILE, pipeline.__name__]
        _write_import(folder, PIPELINE_FILE, pipeline)
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_import(folder: Path, file: str, kind: type) -> None:
    # From the package itself: modules may move.
    (folder / f"{file}.py").write_text(f"from {PACKAGE} import {kind.__name__}\n", encoding="utf-8")


def own_classes(index: dict, types: Mapping[str, tuple[type, ...]]) -> dict:
    """An index whose entries name the modules of our classes instead of the folder's files, wherever the modules are
    now. `types` are the classes that each component of the pipeline may have."""
    classes = {(name, kind.__name__): kind.__module__ for name, kinds in types.items() for kind in kinds}
    found = {}
    for name, entry in index.items():
        if isinstance(entry, list) and len(entry) == 2:
            module = classes.get((name, entry[1]), "")
            ours = module.startswith(f"{PACKAGE}.") and entry[0] not in ("diffusers", "transformers")
            found[name] = [module, entry[1]] if ours else entry
        else:
            found[name] = entry
    if isinstance(index.get("_class_name"), list):
        found["_class_name"] = index["_class_name"][-1]
    return found


def write_card(folder: Path, name: str, kind: str, task: str, call: str) -> None:
    """Write a model card, for the name of a repository or folder, with the pipeline's class, the Hub's name of the
    task and an example of a call."""
    card = CARD_TEMPLATE.format(name=name, quoted=json.dumps(name), kind=kind, task=task, call=call)
    (folder / CARD).write_text(card, encoding="utf-8")
