"""Reads arrays from .npy and .npz files that users give. Nothing is unpickled."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np


ARRAY_SUFFIXES = (".npz", ".npy")
# The name of the array of a .npy file, and of the first one that `numpy.savez` is given without a name.
FIRST = "arr_0"


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    # What numpy raises for empty, cut and other files, and for arrays of Python objects.
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged, or not a .npy or .npz file of numbers: get or write it again") from error


def array_headers(path: Path) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every array in a file, by its name, without reading the values.

    Raises:
        ValueError: if the file is damaged, of another kind, or holds Python objects.
    """
    with _naming(path):
        file = np.load(path, mmap_mode="r")
        if isinstance(file, np.ndarray):
            return {FIRST: (file.shape, file.dtype)}
        with file:
            names = [name for name in file.zip.namelist() if name.endswith(".npy")]
            return {name.removesuffix(".npy"): _header(file.zip, name) for name in names}


def _header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with archive.open(name) as stream:
        shape, _, dtype = readers[np.lib.format.read_magic(stream)](stream)
    return shape, dtype


def read_array(path: Path, name: str = FIRST) -> np.ndarray:
    """An array of a file; that of a .npy stays on disk until it is used."""
    with _naming(path):
        file = np.load(path, mmap_mode="r")
        if isinstance(file, np.ndarray):
            return file
        with file:
            return file[name]
