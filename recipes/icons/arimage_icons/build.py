"""`python -m arimage_icons.build`: the data set that the models of icons are trained on, from an npm package.

Writes train.parquet, val.parquet, test.parquet and sets.json (the licence of each set, and how many of its icons are
in `train` and in `test`), and prints how many icons each rule left out. With `--words` it does the same for a larger
data set, of all icons whose names have known words, with a fourth part: `compositions`, names of two words both of
which training has, but never together.
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

from .dataset.choose import Icon, choose, choose_by_words
from .dataset.draw import draw, to_png
from .dataset.source import WANTED, read_collections, read_sets
from .dataset.split import split, split_by_words


# The folder of the larger data set.
WORDS = "words"
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


def write(
    out: Path, icons: list[Icon], pixels: np.ndarray, parts: dict[str, np.ndarray], labels: dict[str, int]
) -> dict[str, str]:
    """Write the files of a data set into the folder `out`, all of them or none. Returns the digest of each part."""
    by_set = {name: Counter(icons[number].set for number in numbers) for name, numbers in parts.items()}
    licences = {icon.set: icon.licence for icon in icons}
    sets = {name: [licences[name], by_set["train"][name], by_set["test"][name]] for name in sorted(licences)}
    digests = {}
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out, prefix=".partial-") as partial:
        for name, numbers in parts.items():
            rows = [icons[number] for number in numbers], labels, pixels[numbers]
            digests[name] = digest(*rows)
            pq.write_table(to_table(*rows), Path(partial) / f"{name}.parquet")
        (Path(partial) / "sets.json").write_text(json.dumps(sets), "utf-8")
        for path in Path(partial).iterdir():
            os.replace(path, out / path.name)
    return digests


def report(
    names: dict[str, dict], left_out: Counter[str], parts: dict[str, np.ndarray], labels: dict[str, int], digests: dict
) -> None:
    """Print what each rule left out and what is in each part."""
    print(f"{sum(map(len, names.values())):,} icons of {len(names)} sets, of which were left out")
    for reason, count in left_out.items():
        print(f"{count:>9,} {reason}")
    print(f"and there are {len(labels):,} captions in")
    for name, numbers in parts.items():
        print(f"{len(numbers):>9,} rows of {name}.parquet, sha256 {digests[name]}")


def build(package: Path, out: Path, words: bool = False) -> None:
    """Write the four files into the folder `out`, all of them or none; with `words` also the larger data set of icons
    with known words into `out`/words.

    Raises:
        ValueError: if `package` is not a package of icons.
    """
    left_out: Counter[str] = Counter()
    collections = read_collections(package)
    names = {
        prefix: {name: icon.get("hidden", False) for name, icon in data["icons"].items()}
        for prefix, data in read_sets(package)
    }
    icons, pixels = draw(package, choose(collections, names, left_out), left_out)
    parts, labels = split(icons, pixels, left_out)
    digests = write(out, icons, pixels, parts, labels)
    report(names, left_out, parts, labels, digests)
    others = [name for name, expected in TRAINED_ON.items() if digests[name] != expected]
    if others:
        print(f"The packaged models were trained on other rows of {', '.join(others)}, those of {WANTED}.")
    else:
        print("These are the rows that the packaged models were trained on.")
    if words:
        left_out = Counter()
        concepts, val = {icon.caption for icon in icons}, {icons[number] for number in parts["val"]}
        chosen = choose_by_words(collections, names, left_out)
        # Of equal pictures the first one stays: that which is in the data set above.
        icons, pixels = draw(package, sorted(chosen, key=lambda icon: icon.caption not in concepts), left_out)
        order = sorted(range(len(icons)), key=lambda number: (icons[number].set, icons[number].name))
        icons, pixels = [icons[number] for number in order], pixels[order]
        parts, labels = split_by_words(icons, pixels, val, concepts, left_out)
        report(names, left_out, parts, labels, write(out / WORDS, icons, pixels, parts, labels))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True, help=f"what `npm pack {WANTED}` wrote, or its folder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the four files")
    parser.add_argument("--words", action="store_true", help="also write OUT/words, icons of names with known words")
    given = parser.parse_args()
    try:
        build(given.package, given.out, given.words)
    except (OSError, ValueError) as error:
        parser.error(str(error))
