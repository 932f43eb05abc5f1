"""Saving of trained pipelines."""

import copy
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ..eval.runs.files import space_in
from ..pipelines.base import ARPipeline
from .cards import Samples, add_metadata, add_samples
from .processes import processes


def save_float16(pipe: ARPipeline, folder: Path, **metadata: object) -> None:
    """`save_trained` in float16."""
    save_trained(pipe, folder, torch.float16, **metadata)


def save_trained(
    pipe: ARPipeline, folder: Path, dtype: torch.dtype, *, samples: Samples | None = None, **metadata: object
) -> None:
    """Save a copy of a pipeline in a dtype, but for what stays in float32, with `metadata` and `samples` in its card.
    A folder that exists is replaced when the new one is complete. Of processes that train together the first one
    saves."""
    if processes()[0] > 0:
        return
    halves = {
        name: copy.deepcopy(part).to(dtype) if isinstance(part, torch.nn.Module) else part
        for name, part in pipe.components.items()
    }
    _, options = pipe._get_signature_keys(pipe)
    half = type(pipe)(**halves, **{name: pipe.config[name] for name in options - halves.keys() if name in pipe.config})
    half.take_defaults(pipe)

    def save(partial: Path) -> None:
        half.save_pretrained(partial)
        add_metadata(partial, **metadata)
        add_samples(partial, samples)
        # The path that a part was loaded from means nothing elsewhere.
        for file in partial.glob("*/config.json"):
            config = json.loads(file.read_text())
            config.pop("_name_or_path", None)
            file.write_text(json.dumps(config, indent=2) + "\n")

    replace_folder(folder, save)


def replace_folder(folder: Path, save: Callable[[Path], object]) -> None:
    """Replace a folder by what `save` writes into the one that it is given, when that is complete."""
    # The model card shows the name of the folder.
    partial, old = folder.with_name(f".{folder.name}.partial") / folder.name, folder.with_name(f".{folder.name}.old")
    shutil.rmtree(partial.parent, ignore_errors=True)
    try:
        with space_in(folder.parent):
            save(partial)
    except BaseException:
        shutil.rmtree(partial.parent, ignore_errors=True)
        raise
    if folder.exists():
        # What a run that was killed here left.
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)
    os.replace(partial, folder)
    partial.parent.rmdir()
    shutil.rmtree(old, ignore_errors=True)
