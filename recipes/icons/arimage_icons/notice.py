"""`python -m arimage_icons.notice`: the part of NOTICE that names the sets of icons that weights were trained on."""

import argparse
import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq


def lines(collections: dict, counts: Counter[str]) -> list[str]:
    """What NOTICE says about each set: its name, its author, its licence, and how many icons were trained on."""
    found = []
    for name, count in sorted(counts.items()):
        about = collections[name]
        author, licence = about["author"], about["license"]
        found += [
            f"{about['name']} ({name}), {count:,} icons",
            f"  {author['name']}{', ' + author['url'] if 'url' in author else ''}",
            f"  {licence['title']} (SPDX: {licence['spdx']}){', ' + licence['url'] if 'url' in licence else ''}",
        ]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--collections", type=Path, required=True, help="collections.json of @iconify/json")
    parser.add_argument("--train", type=Path, required=True, help="train.parquet")
    given = parser.parse_args()
    sets = Counter(pq.read_table(given.train, columns=["set"])["set"].to_pylist())
    print("\n".join(lines(json.loads(given.collections.read_text("utf-8")), sets)))
