"""What the folder of a run says about its training: a run is resumed with the settings and data that it began with."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..eval.runs.files import (
    LOCK,
    check_fields,
    check_same,
    hold,
    remove_all_leftovers,
    space_in,
    to_json,
    write_whole,
)
from ..media.texts import parse_json
from ..pipelines.adapters.lora import lora_layers
from ..pipelines.base import ARPipeline
from .processes import processes, wait_for_all


SETTINGS = "settings.json"
# Settings that change from a step on, by the name of that step in each of their entries.
LATER = {"restarts": 0, "stages": "start"}


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """Make the folder of a run, keep other commands out of it, and remove what a killed one left there. A folder in
    which nothing was begun does not stay. Of processes that train together the first one does.

    Raises:
        ValueError: if another command uses it, or `torchrun` started several processes that did not join.
        FullDisk: if its disk is full.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) != processes()[1]:
        raise ValueError("this command works in one process: start it without torchrun")
    if processes()[0] > 0:
        yield
        return
    with space_in(out):
        new = [folder for folder in (out, *out.parents) if not folder.exists()]
        out.mkdir(parents=True, exist_ok=True)
        lock = hold(out)
        remove_all_leftovers(out)
        try:
            yield
        finally:
            if lock.lock_counter == 1 and {path.name for path in out.iterdir()} <= {LOCK, SETTINGS}:
                for name in (SETTINGS, LOCK):
                    (out / name).unlink(missing_ok=True)
                _remove_empty(new)
            lock.release()


def _remove_empty(folders: list[Path]) -> None:
    """Remove folders, each in the next one, up to the first that is not empty."""
    for folder in folders:
        if any(folder.iterdir()):
            break
        folder.rmdir()


def check_resumed(out: Path, settings: dict, done: int | None) -> None:
    """Check that the run in `out`, which has taken `done` steps (None: it has no checkpoint), was trained with these
    settings, and write them down. What begins at a later step may differ."""
    if processes()[0] == 0:
        # As in a file, where a tuple is a list.
        settings, path = json.loads(to_json(settings)), out / SETTINGS
        if done is not None:
            if not path.is_file():
                raise ValueError(f"{out} has a checkpoint but no {SETTINGS} to compare with: give another --out")
            remedy = "restore it, or give another --out"
            old = check_fields(parse_json(path.read_bytes(), path, remedy), {}, path, remedy)
            try:
                before = _until(old, done)
            except (TypeError, LookupError) as error:
                raise ValueError(f"{path} has restarts or stages of a wrong type: {remedy}") from error
            remedy = f"ask for the same, give another --out, or delete {out} to begin again"
            # Runs of earlier versions do not say everything.
            known = {name: value for name, value in settings.items() if name in old}
            check_same(path, before, _until(known, done), remedy=remedy)
        write_whole(path, lambda file: file.write_text(to_json(settings), encoding="utf-8"))
    wait_for_all()


def _until(settings: Any, step: int) -> Any:
    """The settings without what begins at `step` or later."""
    if not isinstance(settings, dict):
        return settings
    kept = {name: _until(value, step) for name, value in settings.items()}
    return kept | {name: [one for one in kept[name] if one[key] < step] for name, key in LATER.items() if name in kept}


def of_settings(settings: Any, *without: str) -> dict[str, Any]:
    """The fields of settings, a dataclass, but those `without` and the optimizer, which `fit` knows."""
    every = dataclasses.asdict(settings)
    return {name: value for name, value in every.items() if name not in ("optimizer", *without)}


def of_data(data: Any) -> dict[str, str]:
    """The digest of each field of a data set, a dataclass."""
    return {field.name: digest(getattr(data, field.name)) for field in dataclasses.fields(data)}


def of_networks(pipe: ARPipeline, *without: str) -> dict[str, str]:
    """The digests of the networks of a pipeline."""
    return {
        name: digest(part)
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module) and name not in without
    }


def of_pipeline(pipe: ARPipeline, *without: str) -> dict[str, Any]:
    """What a finished pipeline generates by: its networks but those `without`, their dtype, the adapters that are
    active with their scales, and the default sampling settings."""
    scales = {
        f"{name}.{adapter}": float(layer.scaling[adapter])
        for name, part in pipe.components.items()
        for layer in lora_layers(part)
        for adapter in layer.active_adapters
        if adapter in layer.scaling and not layer.disable_adapters
    }
    return {
        "model": of_networks(pipe, *without),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "adapters": scales,
        "sampling": pipe.generation_config,
    }


def to_metadata(about: dict) -> dict[str, str]:
    """The metadata of a safetensors file with what its tensors depend on."""
    return {"about": to_json(about)}


def check_metadata(path: Path, metadata: dict[str, str] | None, about: dict) -> None:
    """Check that the tensors of a file depend on the same.

    Raises:
        ValueError: naming the first setting that differs.
    """
    remedy = "delete it, or give another --out"
    old = check_fields(parse_json((metadata or {}).get("about", "{}"), path, remedy), {}, path, remedy)
    check_same(path, old, json.loads(to_json(about)))


def digest(value: Any) -> str:
    """The beginning of a SHA-256: of a tensor, of about 256 values of every weight of a network, or of what JSON can
    hold."""
    found = hashlib.sha256()
    if isinstance(value, nn.Module):
        for name, weight in value.state_dict().items():
            # Rounded as on an accelerator, so that a run may move there.
            some = weight.flatten()[:: weight.numel() // 256 + 1].to("cpu", torch.bfloat16).contiguous()
            found.update(name.encode() + some.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode())
        found.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy())
    else:
        found.update(json.dumps(value).encode())
    return found.hexdigest()[:16]
