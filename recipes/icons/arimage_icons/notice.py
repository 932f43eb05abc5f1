"""`python -m arimage_icons.notice`: the part of NOTICE that names the sets of icons that weights were trained on."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from .dataset.source import WANTED, read_collections


def lines(collections: dict, counts: Mapping[str, int]) -> list[str]:
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
    parser.add_argument("--package", type=Path, required=True, help=f"what `npm pack {WANTED}` wrote, or its folder")
    parser.add_argument("--data", type=Path, required=True, help="the folder that arimage_icons.build wrote")
    given = parser.parse_args()
    try:
        sets = json.loads((given.data / "sets.json").read_text("utf-8"))
        collections = read_collections(given.package)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(lines(collections, {name: train for name, (_, train, _) in sets.items() if train})))
