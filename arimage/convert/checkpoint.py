"""What every converter shares: reading a published file without executing anything in it, filling a model with what it
holds, and writing the result as a whole or not at all."""

import argparse
import logging
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..models.mixin import align_weights
from ..models.original_names import rename
from .paths import CheckpointError, check_file, check_vacant


logger = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Pipeline = TypeVar("Pipeline")
WRAPPINGS = ("model", "module", "state_dict", "model_state_dict")
# Where trainers keep the averaged weights (EMA).
AVERAGES = ("model_ema", "ema", "ema_model", "ema_state_dict")
# What DistributedDataParallel, torch.compile, FSDP and activation checkpointing add to names, at the start or in
# between; empty in front of a dot, where flat weights were merged.
ADDED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", ""}
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


def with_plain_layers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Number the layers from first to last, where the original groups them into chunks of equal size."""
    chunked = re.compile(r"block_chunks\.(\d+)\.(?:module\.)?(\d+)\.")
    places = {(int(match[1]), int(match[2])) for key in state if (match := chunked.match(key))}
    numbers = {place: number for number, place in enumerate(sorted(places))}
    return {
        chunked.sub(lambda match: f"blocks.{numbers[int(match[1]), int(match[2])]}.", key): value
        for key, value in state.items()
    }


class OriginalTensors(dict[str, torch.Tensor]):
    """The tensors of a published file by their original names. Its methods raise a `CheckpointError` that names the
    file, if a tensor is missing, unknown or of an unexpected shape. So do the functions `*_from_original`, which take
    `state`, tensors as `load_original` returns them, and `source`, what errors call the file.

    Args:
        tensors: see `load_original`; the dictionary is copied.
        kind: what files like it hold, such as "VAR transformer".
        source: what errors call the file.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], kind: str, source: str | Path):
        super().__init__(tensors)
        self.kind, self.source = kind, source

    def shape(self, key: str, dimensions: int = 2) -> torch.Size:
        """The shape of the tensor `key`, refused if it is missing or has another number of dimensions."""
        if key not in self:
            raise CheckpointError(
                f"{self.source} has no {key!r}, as every {self.kind} has: give the file of a {self.kind}"
            )
        shape = self[key].shape
        if len(shape) != dimensions:
            raise CheckpointError(
                f"{self.source} has {key!r} of shape {tuple(shape)} where {dimensions} dimensions were expected: "
                f"give the file of a {self.kind}"
            )
        return shape

    def count(self, prefix: str) -> int:
        """How many numbers follow `prefix` in the names, as in "blocks.0.", "blocks.1."."""
        numbered = re.compile(re.escape(prefix) + r"(\d+)\.")
        return len({match[1] for key in self if (match := numbered.match(key))})

    def encoder_widths(self, levels: str, block: str) -> list[int]:
        """Channels of a VQGAN's encoder: those of its first convolution, and of `block`.conv1 at each of the numbered
        `levels`. Refused if they are not multiples of the first, or the group norms cannot have their groups."""
        root = levels[: levels.index("encoder.")]
        channels = self.shape(f"{root}encoder.conv_in.weight", 4)[0]
        widths = [self.shape(f"{levels}{n}.{block}.conv1.weight", 4)[0] for n in range(self.count(levels))]
        if not widths or channels < 1 or channels % NORM_NUM_GROUPS or any(w < 1 or w % channels for w in widths):
            raise CheckpointError(
                f"{self.source} has an encoder of widths {[channels, *widths]}, expected multiples of the first, "
                f"itself a multiple of {NORM_NUM_GROUPS}: give the file of a {self.kind}"
            )
        return [channels, *widths]

    def check_heads(self, num_heads: int, hidden_size: int, multiple: int = 4) -> None:
        """Refuse a number of attention heads that does not give each a `multiple` of channels; 4 for rotary positions
        in two dimensions."""
        if num_heads < 1 or hidden_size % num_heads or hidden_size // num_heads % multiple:
            raise CheckpointError(
                f"{self.source} has width {hidden_size}, which does not give {num_heads} heads a multiple of "
                f"{multiple} channels each: give the number of attention heads it was trained with as --num-heads "
                "(num_heads=)"
            )

    def fill(
        self,
        model: Model,
        names: Sequence[tuple[str, str]] | Callable[[str], str],
        *,
        dtype: torch.dtype,
        ignored: str = "(?!)",
    ) -> Model:
        """Put the tensors into `model`, made on the meta device, floating ones in `dtype` and without copying those
        that have it already, and return it in evaluation mode. Refused if one is missing, unknown or of another shape.

        Args:
            names: from a name in `model` to the original one, as pairs that are replaced from top to bottom, or as a
                function.
            ignored: a pattern of the original names that the model does without.
        """
        original_name = names if callable(names) else partial(rename, pairs=names)
        expected = {original_name(name): (name, tensor.shape) for name, tensor in model.state_dict().items()}
        for key, (_, shape) in expected.items():
            if key not in self:
                raise CheckpointError(
                    f"{self.source} has no {key!r}, expected of shape {tuple(shape)}: give a complete file"
                )
            if self[key].shape != shape:
                raise CheckpointError(
                    f"{self.source} has {key!r} of shape {tuple(self[key].shape)} where {tuple(shape)} was expected: "
                    "give the file of one unaltered model"
                )
        for key in self:
            if key not in expected and not re.fullmatch(ignored, key):
                raise CheckpointError(
                    f"{self.source} has {key!r}, unknown to {type(model).__name__}: give the file of an unaltered "
                    "model"
                )
        tensors = {}
        for key, (name, _) in expected.items():
            tensor = self[key].to(dtype) if self[key].is_floating_point() else self[key]
            # Safetensors saves contiguous tensors only.
            tensors[name] = tensor.contiguous()
        model.load_state_dict(tensors, assign=True)
        align_weights(model)
        return model.eval()


def pipeline_of(kind: Callable[..., Pipeline], source: object, *parts: Any, **settings: Any) -> Pipeline:
    """The pipeline of a class with these components.

    Args:
        source: what errors call the files.

    Raises:
        CheckpointError: if the components do not fit each other.
    """
    try:
        return kind(*parts, **settings)
    except ValueError as error:
        raise CheckpointError(f"{source} does not fit: {error}") from error


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
    # The model card shows the name of the folder.
    whole = partial / out.name
    whole.mkdir(parents=True)
    try:
        try:
            save(whole)
        # What safetensors raises for a full disk.
        except SafetensorError as error:
            raise OSError(f"{out} cannot be written ({error}): make room, and convert again") from error
        if out.exists():
            out.rmdir()
        whole.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
