"""Builds the data set of the packaged models, train.parquet and heldout.parquet, from clones of public repositories.

REPRODUCE.md names the repositories, their commits and the packages.

python recipes/emoji/tools/emoji_dataset.py build --noto noto-emoji --blobmoji blobmoji --twemoji twemoji-assets \
    --cldr cldr-json --emojibase emojibase --out emoji
python recipes/emoji/tools/emoji_dataset.py check emoji
"""

import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
import typer
from emoji_content import METADATA, PICTURES, Content, compare, read_content
from emoji_rows import list_rows
from PIL import Image


SIZE = 128
# Twemoji fill their view box; Noto and Blob have a margin.
TWEMOJI_SIZE = 116
FILES = ("train", "heldout")
RESVG = "resvg_py==0.5.0"

# The files that the packaged models were trained on.
EXPECTED = {
    "train": Content(
        rows=9397,
        digest="ff8b95036d2587b3fac45007fb7b69e926d60e04e631d939fcbf91018cdee509",
        columns={
            "image.path": "313cee2e108893fc",
            "alpha.path": "9219300c80738b29",
            "caption": "0c92e961c93b816e",
            "captions": "eb2272a2b5369a10",
            "name": "0f83f78f538d9f44",
            "keywords": "3f962392017fadfa",
            "style": "049d888714138533",
            "codepoints": "9b465f46fba51641",
            "group": "7baa58bea3d436ba",
            "subgroup": "6f4738c67cba681b",
            "base": "bc468a084bf7e3b2",
            "skin_tones": "8f32ffcf8e8caa0f",
            "weight": "46cb1f889d240b42",
            "license": "7e3ba1a326a19ca5",
            "split": "ec6370ba2fe16bc9",
            "image": "e91c28dc3d0e3305",
            "alpha": "1d251ea283d54578",
        },
    ),
    "heldout": Content(
        rows=656,
        digest="a399dcb8c7e177279de9da92f074b5a8fc391519aaca9548dc433a3e729ade13",
        columns={
            "image.path": "58cfa06cce82481e",
            "alpha.path": "cef8fe36395ed82b",
            "caption": "45506e478121ee7a",
            "captions": "9061bcb770205c99",
            "name": "d41a5156c8304f02",
            "keywords": "200bc743c03dece1",
            "style": "d533f27b72abf18d",
            "codepoints": "09c493dacf8a1a65",
            "group": "e637b341ab6a7ce0",
            "subgroup": "60578f5d3de108e2",
            "base": "f5798fa705f09856",
            "skin_tones": "ddc3f191e571c119",
            "weight": "d18249c8e0c37f72",
            "license": "f331d51a747cb540",
            "split": "c17ea005cbb0194c",
            "image": "ce5006d3e4bca621",
            "alpha": "b242e6b4e87484d1",
        },
    ),
}

Reference = Annotated[
    Path | None,
    typer.Option(
        exists=True, file_okay=False, help="A folder of the same two files, to count the rows that are equal."
    ),
]

app = typer.Typer(
    help="Build and check the data set of the packaged models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def clone(repository: str) -> Any:
    """An option that takes a clone."""
    return typer.Option(exists=True, file_okay=False, help=f"A clone of github.com/{repository}.")


def load_resvg() -> ModuleType:
    """The package that renders SVG files. Nothing else needs it.

    Raises:
        ValueError: if it is not installed.
    """
    try:
        return importlib.import_module("resvg_py")
    except ImportError as error:
        raise ValueError(f"Twemoji are SVG files, which need resvg: pip install {RESVG}") from error


def render(file: Path, resvg: ModuleType) -> Image.Image:
    """An SVG file inside a transparent margin.

    Raises:
        ValueError: if the package ignores the size, as some versions do.
    """
    text = file.read_text(encoding="utf-8")
    data = resvg.svg_to_bytes(svg_string=text, width=TWEMOJI_SIZE, height=TWEMOJI_SIZE, skip_system_fonts=True)
    drawing = Image.open(io.BytesIO(bytes(data))).convert("RGBA")
    if max(drawing.size) != TWEMOJI_SIZE:
        raise ValueError(f"resvg rendered {file} at another size than {TWEMOJI_SIZE}: pip install {RESVG}")
    picture = Image.new("RGBA", (SIZE, SIZE))
    # The one file that is not square, a slice of watermelon, lies at the top in the original too.
    margin = (SIZE - TWEMOJI_SIZE) // 2
    picture.paste(drawing, (margin, margin))
    return picture


def read_sprite(file: Path, resvg: ModuleType) -> Image.Image:
    """The picture of a row with its transparency.

    Raises:
        ValueError: if it has another size.
    """
    sprite = render(file, resvg) if file.suffix == ".svg" else Image.open(file).convert("RGBA")
    if sprite.size != (SIZE, SIZE):
        raise ValueError(f"{file} is not of {SIZE} x {SIZE} pixels: check out the commit that REPRODUCE.md names")
    return sprite


def to_webp(picture: Image.Image, **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", method=4, **options)
    return buffer.getvalue()


def encode(sprite: Image.Image) -> dict[str, bytes]:
    """The two pictures of a row: on white, and how opaque it is."""
    white = Image.new("RGBA", sprite.size, "white")
    return {
        "image": to_webp(Image.alpha_composite(white, sprite).convert("RGB"), quality=92),
        "alpha": to_webp(sprite.getchannel("A"), lossless=True),
    }


def schema() -> pa.Schema:
    """The columns, with what `datasets` reads pictures by."""
    texts = pa.list_(pa.string())
    kinds = {"captions": texts, "keywords": texts, "skin_tones": texts, "weight": pa.float64()}
    picture = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {"info": {"features": {name: {"_type": "Image"} for name in PICTURES}}}
    return pa.schema(
        [*((name, picture) for name in PICTURES), *((name, kinds.get(name, pa.string())) for name in METADATA)],
        metadata={"huggingface": json.dumps(features)},
    )


def write_files(rows: Iterator[tuple[Path, dict]], out: Path) -> None:
    """Write both files, once all their rows are there."""
    resvg = load_resvg()
    tables: dict[str, list[dict]] = {name: [] for name in FILES}
    for file, row in rows:
        stem = f"{row['style']}_{row['codepoints']}"
        paths = {"image": f"{stem}.webp", "alpha": f"{stem}_a.webp"}
        pictures = {
            name: {"bytes": data, "path": paths[name]} for name, data in encode(read_sprite(file, resvg)).items()
        }
        tables["train" if row["split"] == "train" else "heldout"].append({**pictures, **row})
    out.mkdir(parents=True, exist_ok=True)
    for name, found in tables.items():
        table = pa.Table.from_pylist(found, schema())
        pq.write_table(table, out / f"{name}.parquet", compression="zstd", row_group_size=500)


def describe_comparison(path: Path, reference: Path) -> Iterator[str]:
    """How many rows are equal, a line per column, and how far pixels are off."""
    found = compare(path, reference)
    for name, count in found.equal.items():
        off = f"; at most {found.most[name]} levels off, {found.mean[name]:.4f} on average" if name in PICTURES else ""
        yield f"{name}: {count} of {found.rows[1]} rows equal{off}"
    if found.same_rows and not found.same:
        yield f"same rows, pixels within {max(found.most.values())} levels"


def file_of(folder: Path, name: str) -> Path:
    """One of the two files of a folder.

    Raises:
        ValueError: if there is none.
    """
    path = folder / f"{name}.parquet"
    if not path.is_file():
        raise ValueError(f"{folder} holds no {path.name}: give a folder that `build --out` wrote")
    return path


def check_folder(folder: Path, reference: Path | None) -> None:
    """Print what the files hold.

    Raises:
        ValueError: if that is not what the packaged models were trained on.
    """
    wrong: dict[str, list[str]] = {}
    for name in FILES:
        path = file_of(folder, name)
        content, expected = read_content(path), EXPECTED[name]
        differing = content.differing(expected)
        typer.echo(f"{path.name}: {content.rows} rows, sha256 {content.digest}")
        if content.digest != expected.digest:
            wrong[path.name] = differing
            typer.echo(f"  expected {expected.rows} rows, sha256 {expected.digest}")
            typer.echo(f"  other values in: {', '.join(differing)}")
        if reference is not None:
            for line in describe_comparison(path, file_of(reference, name)):
                typer.echo(f"  {line}")
    columns = dict.fromkeys(column for differing in wrong.values() for column in differing)
    if columns.keys() - PICTURES.keys():
        raise ValueError(
            f"{', '.join(columns)} in {' and '.join(wrong)} are not what the packaged models were trained on: "
            "check out the commits that REPRODUCE.md names"
        )
    if wrong:
        raise ValueError(
            f"the rows are the same, but the pixels of {', '.join(columns)} in {' and '.join(wrong)} are not: "
            "install the packages that REPRODUCE.md names, or measure the difference with --reference"
        )


@app.command()
def build(
    noto: Annotated[Path, clone("googlefonts/noto-emoji")],
    blobmoji: Annotated[Path, clone("C1710/blobmoji")],
    twemoji: Annotated[Path, clone("cptpiepmatz/twemoji-assets")],
    cldr: Annotated[Path, clone("unicode-org/cldr-json")],
    emojibase: Annotated[Path, clone("milesj/emojibase")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for train.parquet and heldout.parquet.")],
    reference: Reference = None,
) -> None:
    """Build both files, and check that they are what the packaged models were trained on."""
    write_files(list_rows({"noto": noto, "blob": blobmoji, "twemoji": twemoji}, emojibase, cldr), out)
    check_folder(out, reference)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="The folder of both files.")],
    reference: Reference = None,
) -> None:
    """Check that both files are what the packaged models were trained on."""
    check_folder(folder, reference)


if __name__ == "__main__":
    try:
        app()
    except ValueError as error:
        sys.exit(f"emoji_dataset: {error}")
