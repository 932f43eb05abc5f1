"""Saving that replaces what an earlier save wrote, as a whole or not at all, and what cannot be saved."""

import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from diffusers.hooks.group_offloading import _GROUP_OFFLOADING
from diffusers.hooks.layerwise_casting import _LAYERWISE_CASTING_HOOK
from diffusers.utils import hub_utils
from safetensors import SafetensorError
from torch import nn


# Why diffusers' offloading to disk is refused.
DISK = (
    "where diffusers mixes up files (layers that share a weight compute with other numbers, and a folder that "
    "was used before gives the weights of another model): load the pipeline again, and offload to memory"
)


# Weights in one file, in one of several, or the index of several: of which variant they are.
WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.([^.]+?))?(?:-\d{5}-of-\d{5})?\.(?:safetensors|bin)"
    r"(?:\.index(?:\.([^.]+))?\.json)?"
)
# The folders that a save makes in the one that it saves to, and how many seconds one may take.
LEFT, DAY = re.compile(r"\.[0-9a-f]{8}\.(new|old)"), 86_400
# What components without weights and their configurations are loaded from.
OTHERS = ("*.json", "*.jinja", "*.model", "*.py", "merges.txt", "vocab.txt", "additional_chat_templates/*.jinja")


def check_safe(safe_serialization: bool) -> None:
    """Raise a `ValueError` if pickles are to be written."""
    if not safe_serialization:
        raise ValueError(
            "safe_serialization is False, but only .safetensors files are loaded, since others may run code: leave it "
            "out"
        )


def weights_in(folder: Path, variant: str | None) -> list[Path]:
    """The files with weights of a variant in the folder of a component."""
    names = {path: WEIGHTS.fullmatch(path.name) for path in folder.glob("*")}
    return [path for path, name in names.items() if name is not None and (name[1] or name[2]) == variant]


def files_in(folder: Path, variant: str | None) -> list[Path]:
    """The files in the folder of a component that its loader reads, without the weights of other variants."""
    others = [path for pattern in OTHERS for path in folder.glob(pattern) if not WEIGHTS.fullmatch(path.name)]
    return others + weights_in(folder, variant)


def replace_files(folder: Path, save: Callable[[Path], object], stale: Iterable[Path] = (), first: str = "") -> None:
    """Let `save` write into an empty folder, and put what it wrote into `folder`, which is made if it is missing.
    Other files in it stay.

    Args:
        stale: files in `folder` that are removed if `save` does not write them.
        first: the file without which no loader reads the folder. It goes first and comes last, so that a folder that
            has it is whole, even if the process is killed meanwhile.

    Raises:
        ValueError: if `folder` is a file.
        OSError: if it cannot be written.
        Whatever `save` raises. The folder is then as it was before.
    """
    folder = folder.absolute()
    if folder.is_file():
        raise ValueError(f"{folder} is a file: give the path of a folder")
    made = next((path for path in reversed([folder, *folder.parents]) if not path.exists()), None)
    new, old = (folder / f".{uuid4().hex[:8]}.{name}" for name in ("new", "old"))
    try:
        new.mkdir(parents=True)
        _sweep(folder)
        save(new)
        written = {path.relative_to(new) for path in new.rglob("*") if not path.is_dir()}
        replaced = written | {path.absolute().relative_to(folder) for path in stale}
        _exchange(folder, new, old, written, replaced, Path(first))
    except BaseException as error:
        shutil.rmtree(new, ignore_errors=True)
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        # What safetensors raises for a full disk.
        if isinstance(error, SafetensorError):
            raise OSError(f"{folder} cannot be written ({error}): make room, and save again") from error
        raise
    shutil.rmtree(new)
    shutil.rmtree(old)


def _sweep(folder: Path) -> None:
    """Remove what saves left that were killed, but not those of other processes that may still be running."""
    for left in folder.glob(".*"):
        if LEFT.fullmatch(left.name) and time.time() - left.stat().st_mtime > DAY:
            shutil.rmtree(left)


def _exchange(folder: Path, new: Path, old: Path, written: set[Path], replaced: set[Path], first: Path) -> None:
    """Move the files `replaced` from `folder` to `old`, and those `written` from `new` to `folder`; all or none."""
    old.mkdir()
    moves = [(folder / path, old / path) for path in sorted(replaced, key=lambda path: path != first)]
    moves += [(new / path, folder / path) for path in sorted(written, key=lambda path: path == first)]
    done = []
    try:
        for source, target in moves:
            if os.path.lexists(source):
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, target)
                done.append((source, target))
    except BaseException:
        for source, target in reversed(done):
            os.replace(target, source)
        shutil.rmtree(old)
        raise
    # Of a component that is not saved any more.
    for parent in {path.parent for path in replaced} - {Path()}:
        if not any((folder / parent).iterdir()):
            (folder / parent).rmdir()


def upload(part: Any, folder: Path, *, repo_id: str | None = None, private: bool | None = None, **options) -> None:
    """Upload the saved folder of a pipeline or component to the Hub, as `save_pretrained(push_to_hub=True)` of
    diffusers does, with the options of its `_upload_folder`: `token`, `commit_message` and `create_pr`."""
    token = options.get("token")
    repository = hub_utils.create_repo(
        repo_id or folder.absolute().name, exist_ok=True, private=private, token=token
    ).repo_id
    card = hub_utils.load_or_create_model_card(repository, token=token)
    hub_utils.populate_model_card(card).save(folder / "README.md")
    part._upload_folder(folder, repository, **options)


def _hook(module: nn.Module, name: str) -> Any:
    """A hook of diffusers on this module itself, for which `hasattr` would take long to find none."""
    registry = vars(module).get("_diffusers_hook")
    return None if registry is None else registry.get_hook(name)


def check_no_disk(options: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if options of offloading by groups ask for weights on disk."""
    if options.get("offload_to_disk_path") is not None:
        raise ValueError(f"offload_to_disk_path is {options['offload_to_disk_path']!r}, {DISK}")


def check_without_disk(name: str, module: nn.Module) -> None:
    """Raise a `ValueError` if diffusers offloads weights of a component to disk."""
    for part in module.modules():
        hook = _hook(part, _GROUP_OFFLOADING)
        if hook is not None and hook.config.offload_to_disk_path is not None:
            raise ValueError(f"{name} is offloaded to {hook.config.offload_to_disk_path!r}, {DISK}")


def check_savable(name: str, module: nn.Module) -> None:
    """Raise a `ValueError` if the weights of a component, which the error calls `name`, are not its own: rounded by
    layerwise casting, in float8, with adapters, or offloaded layer by layer or to disk."""
    check_without_disk(name, module)
    # Of a library that loads its quantised weights itself.
    packed = getattr(module, "hf_quantizer", None) is not None
    for part in module.modules():
        if _hook(part, _LAYERWISE_CASTING_HOOK) is not None:
            raise ValueError(
                f"{name} has weights that layerwise casting has rounded: save it before enable_layerwise_casting"
            )
    for key, weight in (*module.named_parameters(), *module.named_buffers()):
        # What peft calls a layer with adapters.
        if ".base_layer." in key:
            raise ValueError(f"{name} has adapters, and no loader reads such a file: fuse and unload them first")
        if weight.is_meta:
            raise ValueError(f"{name} has weights that are offloaded layer by layer: save it before offloading")
        if weight.is_floating_point() and weight.itemsize == 1 and not packed:
            raise ValueError(f"{name} has weights in {weight.dtype}, which no loader scales: save it before rounding")


def refuse_to_save(network: nn.Module) -> None:
    """Refuse `save_pretrained` of a component with quantised weights from now on, of whichever library it is, and of
    the models within it."""
    for part in network.modules():
        if hasattr(type(part), "save_pretrained"):
            part.save_pretrained = _refused


def _refused(*_args: Any, **_options: Any) -> None:
    raise ValueError("the weights are of 8 bits, and no loader reads their scales: save before quantize_weights")
