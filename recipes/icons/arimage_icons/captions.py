"""`python -m arimage_icons.captions`: add a column of captions with words of style to the files of the data set, and
write the tokenizer of their words."""

import argparse
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .words import styles_of, word_tokenizer


def captions_of(caption: str, name: str, icon_set: str) -> list[str]:
    """The captions of an icon: with its words of style, if it has any, and without."""
    styles = styles_of(caption, name, icon_set)
    return [" ".join([*styles, caption]), caption] if styles else [caption]


def write_captions(data: Path, out: Path) -> None:
    """Write the parquet files of `data` with the column `captions`, and the tokenizer, into the folder `out`.

    Raises:
        ValueError: if the folder has none.
    """
    if not (paths := sorted(data.glob("*.parquet"))):
        raise ValueError(f"{data} has no parquet files: give the folder that arimage_icons.build wrote")
    out.mkdir(parents=True, exist_ok=True)
    every = set()
    for path in paths:
        table = pq.read_table(path)
        rows = zip(*(table[name].to_pylist() for name in ("caption", "name", "set")), strict=True)
        captions = [captions_of(*row) for row in rows]
        every |= {its[-1] for its in captions}
        pq.write_table(table.append_column("captions", pa.array(captions)), out / path.name)
        print(f"{out / path.name}: {len(captions)} icons", flush=True)
    word_tokenizer(every).save_pretrained(out / "words")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that arimage_icons.build wrote")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    given = parser.parse_args()
    try:
        write_captions(given.data, given.out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
