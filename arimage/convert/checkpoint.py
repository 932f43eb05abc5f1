"""What every converter shares: reading a published file without executing anything in it, filling a model with what it
holds, and writing the result as a whole or not at all."""

import argparse
import logging
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..models.mixin import align_weights
from .paths import CheckpointError, check_file, check_vacant


logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
WRAPPINGS = ("model", "module", "state_dict")
# Where trainers keep the averaged weights (EMA).
AVERAGES = ("model_ema", "ema", "ema_model", "ema_state_dict")
# What DistributedDataParallel, torch.compile, FSDP and activation checkpointing add to names, at the start or in
# between.
ADDED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Groups of every group norm of the published image tokenizers; the tensors do not show them.
NORM_NUM_GROUPS = 32


def load_original(
    path: str | Path, wrappings: tuple[str, ...] = WRAPPINGS, *, ema: bool | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a published checkpoint by their original names, on the CPU, memory-mapped where possible.

    Files that end in .safetensors are read as such, all others as `torch.save` wrote them: the tensors themselves, or
    under one of `wrappings` or several nested, next to a trainer's optimizer, arguments and more. Names lose what
    wrappers of modules, such as `torch.compile`, added to them. Nothing in the file is executed.

    Args:
        path: the file.
        wrappings: the keys under which the tensors may lie, the preferred first. Averaged weights come last.
        ema: True for the averaged weights (EMA) of a trainer's checkpoint, False for the others, with a warning if
            there are averaged ones, None for the others without it.

    Raises:
        CheckpointError: if the file is missing, cut short, holds Python objects that would have to be executed, is not
            a dictionary of tensors, or has no averaged weights where they are asked for.
    """
    path = Path(path)
    check_file(path)
    loaded = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    names, chosen = (*AVERAGES, *wrappings) if ema else (*wrappings, *AVERAGES), []
    while isinstance(loaded, dict):
        found = [name for name in names if isinstance(loaded.get(name), dict)]
        if not found:
            break
        if ema is False and found[0] not in AVERAGES and (averages := set(found) & set(AVERAGES)):
            logger.warning(
                f"{path} has averaged weights too, under {min(averages)!r}: convert with ema=True (--ema) to take "
                f"them instead of those under {found[0]!r}"
            )
        chosen.append(found[0])
        loaded = loaded[found[0]]
    if ema and not set(chosen) & set(AVERAGES):
        raise CheckpointError(
            f"{path} has no averaged weights ({', '.join(AVERAGES)}): convert it without --ema (ema=True)"
        )
    if not isinstance(loaded, dict) or not loaded:
        raise CheckpointError(f"{path} does not hold a dictionary of tensors: give the checkpoint of a model")
    tensors = {}
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{path} has a value of type {type(value).__name__} under {key!r} where a tensor was expected: give a "
                f"file whose tensors lie at its top or under {', '.join(names)}"
            )
        name = ".".join(part for part in key.split(".") if part not in ADDED)
        if name in tensors:
            raise CheckpointError(
                f"{path} has {name!r} twice, the second time as {key!r}: give the weights of one model"
            )
        # The counter of torch's AveragedModel.
        if key != "n_averaged":
            tensors[name] = value
    return tensors


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is cut short or not a safetensors file ({error}): download it again") from error


def _read_torch(path: Path) -> object:
    zipped = zipfile.is_zipfile(path)
    with path.open("rb") as file:
        magic = file.read(2)
    if not zipped and magic == b"PK":
        raise CheckpointError(f"{path} is cut short: download it again")
    if not zipped and magic[:1] != b"\x80":
        raise CheckpointError(
            f"{path} is not a file of torch.save or safetensors: give the published checkpoint itself"
        )
    try:
        # Trainers store their command line next to the weights.
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except (OSError, MemoryError):
        raise
    # A damaged pickle can fail in any way at all.
    except Exception as error:
        unsafe = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
        if unsafe:
            raise CheckpointError(
                f"{path} asks to run {unsafe[1]} when it is read, so it was not: give a file of tensors alone"
            ) from error
        raise CheckpointError(f"{path} is damaged or not a checkpoint of torch.save: download it again") from error


def shape_of(
    state: dict[str, torch.Tensor], key: str, dimensions: int, *, source: str | Path, kind: str
) -> torch.Size:
    """The shape of `state[key]`, a tensor with `dimensions` dimensions in every file of this `kind`.

    Raises:
        CheckpointError: if the key is missing or has another number of dimensions.
    """
    if key not in state:
        raise CheckpointError(f"{source} has no {key!r}, as every {kind} has: give the file of a {kind}")
    shape = state[key].shape
    if len(shape) != dimensions:
        raise CheckpointError(
            f"{source} has {key!r} of shape {tuple(shape)} where {dimensions} dimensions were expected: "
            f"give the file of a {kind}"
        )
    return shape


def multipliers_of(widths: list[int], *, source: str | Path, kind: str) -> list[int]:
    """By how much every level of a VQGAN is wider than its first convolution, `widths[0]`.

    Raises:
        CheckpointError: if that is not a whole number, or the norms cannot have their groups.
    """
    channels, *levels = widths
    if not levels or channels < 1 or channels % NORM_NUM_GROUPS or any(w < 1 or w % channels for w in levels):
        raise CheckpointError(
            f"{source} has an encoder of widths {widths}, expected multiples of the first, itself a multiple of "
            f"{NORM_NUM_GROUPS}: give the file of a {kind}"
        )
    return [width // channels for width in levels]


def check_heads(num_heads: int, hidden_size: int, source: str | Path) -> None:
    """Refuse a number of attention heads that cannot have a rotary embedding of two dimensions each.

    Raises:
        CheckpointError: if `hidden_size` does not give every head a multiple of 4 channels.
    """
    if num_heads < 1 or hidden_size % num_heads or hidden_size // num_heads % 4:
        raise CheckpointError(
            f"{source} has width {hidden_size}, which does not give {num_heads} heads a multiple of 4 channels each: "
            "give the number of attention heads it was trained with as --num-heads (num_heads=)"
        )


def fill(
    model: Model,
    state: dict[str, torch.Tensor],
    original_name: Callable[[str], str],
    *,
    dtype: torch.dtype,
    ignored: str,
    source: str | Path,
) -> Model:
    """Put the tensors of `state` into `model`, made on the meta device, floating ones in `dtype` and without copying
    those that have it already, and return it in evaluation mode.

    Args:
        original_name: from a name in `model` to its name in `state`.
        ignored: a pattern of the names in `state` that the model does without.

    Raises:
        CheckpointError: if a tensor is missing, unknown or of another shape.
    """
    expected = {original_name(name): (name, tensor.shape) for name, tensor in model.state_dict().items()}
    for key, (_, shape) in expected.items():
        if key not in state:
            raise CheckpointError(f"{source} has no {key!r}, expected of shape {tuple(shape)}: give a complete file")
        if state[key].shape != shape:
            raise CheckpointError(
                f"{source} has {key!r} of shape {tuple(state[key].shape)} where {tuple(shape)} was expected: "
                "give the file of one unaltered model"
            )
    for key in state:
        if key not in expected and not re.fullmatch(ignored, key):
            raise CheckpointError(
                f"{source} has {key!r}, unknown to {type(model).__name__}: give the file of an unaltered model"
            )
    tensors = {}
    for key, (name, _) in expected.items():
        tensor = state[key].to(dtype) if state[key].is_floating_point() else state[key]
        # Safetensors saves contiguous tensors only.
        tensors[name] = tensor.contiguous()
    model.load_state_dict(tensors, assign=True)
    align_weights(model)
    return model.eval()


def save_whole(save: Callable[[Path], object], out: str | Path | None) -> None:
    """Let `save` write into a folder next to `out`, which becomes `out` once all of it is there. None saves nothing.

    Raises:
        CheckpointError: if `out` is a file or a folder with something in it.
        OSError: if it cannot be written; nothing is left behind.
    """
    if out is None:
        return
    check_vacant(out)
    out = Path(out).absolute()
    partial = out.with_name(f".{out.name}.{uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        try:
            save(partial)
        # What safetensors raises for a full disk.
        except SafetensorError as error:
            raise OSError(f"{out} cannot be written ({error}): make room, and convert again") from error
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
