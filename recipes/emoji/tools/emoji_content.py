"""What a file of the emoji data set holds: digests of its rows, and a comparison of two files.

Pictures count by their decoded pixels, so that it does not matter how a file is compressed.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image


PICTURES = {"image": "RGB", "alpha": "L"}
METADATA = [
    *("caption", "captions", "name", "keywords", "style", "codepoints", "group", "subgroup", "base", "skin_tones"),
    *("weight", "license", "split"),
]
# The names of the picture files are columns of their own.
COLUMNS = [*(f"{name}.path" for name in PICTURES), *METADATA, *PICTURES]


@dataclass(frozen=True)
class Content:
    """SHA-256 of the rows of a file in order: of all columns, and of each."""

    rows: int
    digest: str
    columns: dict[str, str]

    def differing(self, other: "Content") -> list[str]:
        """The columns that are not the same."""
        return [name for name in COLUMNS if self.columns[name] != other.columns[name]]


@dataclass
class Comparison:
    """How many rows of two files are equal, per column, and how far pixels are off in levels of 255."""

    rows: tuple[int, int]
    equal: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PICTURES, 0))
    mean: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PICTURES, 0.0))

    @property
    def same_rows(self) -> bool:
        """Whether all but the pixels is equal."""
        counts = {self.equal[name] for name in COLUMNS if name not in PICTURES}
        return {*self.rows} == counts

    @property
    def same(self) -> bool:
        return {*self.rows} == {*self.equal.values()}


def read_values(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file: a value per column, pixels as arrays.

    Raises:
        ValueError: if it does not have the columns of the data set.
    """
    file = pq.ParquetFile(path)
    if {*file.schema_arrow.names} != {*METADATA, *PICTURES}:
        raise ValueError(f"{path} has other columns than {', '.join([*PICTURES, *METADATA])}: build it again")
    for batch in file.iter_batches(256):
        for row in batch.to_pylist():
            values = {name: row[name] for name in METADATA}
            for name, mode in PICTURES.items():
                values[f"{name}.path"] = row[name]["path"]
                values[name] = np.asarray(Image.open(io.BytesIO(row[name]["bytes"])).convert(mode))
            yield values


def to_bytes(value: object) -> bytes:
    """A value in a form that tells any two apart."""
    if isinstance(value, np.ndarray):
        return f"{value.shape}".encode() + value.tobytes()
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def read_content(path: Path) -> Content:
    """The digests of a file."""
    whole, columns, count = hashlib.sha256(), {name: hashlib.sha256() for name in COLUMNS}, 0
    for values in read_values(path):
        count += 1
        for name, digest in columns.items():
            data = to_bytes(values[name])
            digest.update(data)
            whole.update(data)
    return Content(count, whole.hexdigest(), {name: digest.hexdigest()[:16] for name, digest in columns.items()})


def compare(path: Path, reference: Path) -> Comparison:
    """A file and a reference, row by row."""
    found = Comparison((pq.ParquetFile(path).metadata.num_rows, pq.ParquetFile(reference).metadata.num_rows))
    off: dict[str, list[float]] = {name: [] for name in PICTURES}
    for ours, theirs in zip(read_values(path), read_values(reference), strict=False):
        for name in COLUMNS:
            found.equal[name] += to_bytes(ours[name]) == to_bytes(theirs[name])
        for name in PICTURES:
            levels = np.abs(np.subtract(ours[name], theirs[name], dtype=np.int16))
            found.most[name] = max(found.most[name], int(levels.max()))
            off[name].append(float(levels.mean()))
    found.mean = {name: float(np.mean(levels)) if levels else 0.0 for name, levels in off.items()}
    return found
