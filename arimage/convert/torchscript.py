"""Reading the tensors of a TorchScript archive without running its program."""

import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from .paths import CheckpointError


# The storages of tensors that a published archive may hold.
DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "BoolStorage": torch.bool,
}


class _Module(dict):
    """The attributes of an object of the archive's own classes."""

    def __setstate__(self, state):
        self.update(state)


class _Reader(pickle.Unpickler):
    """Builds modules of tensors from data.pkl. Whatever else it names is refused, and nothing is called but what is
    here."""

    def __init__(self, archive: zipfile.ZipFile, folder: str):
        super().__init__(archive.open(f"{folder}/data.pkl"))
        self._archive, self._folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith("__torch__"):
            return _Module
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch.jit._pickle" and name.startswith("build_"):
            return list
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")

    def persistent_load(self, pid: tuple) -> torch.Tensor:
        _, dtype, key, _, size = pid
        data = self._archive.read(f"{self._folder}/data/{key}")
        if len(data) != size * dtype.itemsize:
            raise pickle.UnpicklingError(f"data/{key} has {len(data)} bytes instead of {size * dtype.itemsize}")
        return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _tensor(storage: torch.Tensor, offset: int, size: tuple, stride: tuple, *_: Any) -> torch.Tensor:
    return storage.as_strided(size, stride, offset)


def load_torchscript(path: str | Path) -> dict[str, torch.Tensor]:
    """The parameters and buffers of a TorchScript archive by the names of its `state_dict`, on the CPU. Nothing in the
    file is executed.

    Raises:
        CheckpointError: if the file is missing, damaged, or holds other objects than modules of tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file: give the path of a published archive")
    try:
        with zipfile.ZipFile(path) as archive:
            folders = [name.removesuffix("/data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(folders) != 1:
                raise CheckpointError(f"{path} is not a TorchScript archive: give the published .jit file")
            order = f"{folders[0]}/byteorder"
            if order in archive.namelist() and archive.read(order) != b"little":
                raise CheckpointError(f"{path} was written on a big-endian machine: save it again on another")
            root = _Reader(archive, folders[0]).load()
    except (OSError, MemoryError, CheckpointError):
        raise
    # A damaged pickle can fail in any way at all.
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or not an archive of tensors ({error}): download it again"
        ) from error
    if not isinstance(root, _Module):
        raise CheckpointError(f"{path} does not hold a module: give the published .jit file")
    return dict(_named_tensors(root))


def _named_tensors(module: _Module, prefix: str = ""):
    for name, value in module.items():
        if isinstance(value, torch.Tensor):
            yield prefix + name, value
        elif isinstance(value, _Module):
            yield from _named_tensors(value, f"{prefix}{name}.")
