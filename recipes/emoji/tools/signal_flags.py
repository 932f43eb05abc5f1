"""What an adapter for the pictures of examples/signal_flags.py learned, and what the model kept. See
benchmarks/notes/training.md.

python recipes/emoji/tools/signal_flags.py flags --new base-new adapter-new --old base-old adapter-old --out lora.png

Prints a row per run of `arimage eval generate`: the share of its images whose nearest picture has the name asked for,
among the pictures of the packaged reference and the flags, and forward passes per image. The sheet shows the flags,
what the first and the second run of --new make of their first captions, and some images of --old.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from arimage.eval.metrics.standard_errors import estimate_text, mean_estimate
from arimage.eval.runs.run_folder import prompts_of, read_finished
from arimage.media.files import read_image
from arimage.media.gallery import GALLERY_SIZE
from arimage.media.texts import read_rows
from arimage_emoji.metrics.reference import read_gallery, to_pixels


COLUMNS, TILE = 10, 64


def accepted(row: dict) -> list[str]:
    """The names of what a row of a manifest asks for: a flag, or the only part of a row of `emoji-checks`."""
    metadata = row["metadata"]
    return [metadata["name"]] if "name" in metadata else metadata["parts"][0]


def hits(run: Path, gallery: torch.Tensor, names: list[str]) -> torch.Tensor:
    """Whether the nearest picture of the gallery, by pixels, has a name that is asked for, in the order of the
    manifest: bool [N]."""
    rows = read_finished(run)[0]
    pixels = torch.from_numpy(np.stack([to_pixels(read_image(run / row["path"]), GALLERY_SIZE) for row in rows]))
    nearest = torch.cdist(pixels.flatten(1), gallery.flatten(1)).argmin(1).tolist()
    return torch.tensor([names[k] in accepted(row) for k, row in zip(nearest, rows, strict=True)])


def describe(run: Path, found: torch.Tensor) -> list[str]:
    """A row per kind of prompt: retrieval with its 95 % interval over other prompts, and passes."""
    rows, results = read_finished(run)
    lines = []
    for kind in dict.fromkeys(row["metadata"].get("check", "flags") for row in rows):
        ids = [row["id"] for row in rows if row["metadata"].get("check", "flags") == kind]
        share = mean_estimate(found[ids].numpy(), prompts_of([rows[id] for id in ids]))
        passes = float(np.mean([results[id]["passes"] for id in ids]))
        text = estimate_text(share.value, share.standard_error, share.interval)
        lines.append(f"| {run.name} | {kind} | {len(ids)} | {text} | {passes:.1f} |")
    return lines


def sheet(rows: list[list[Image.Image]]) -> Image.Image:
    """Blocks of `COLUMNS` pictures: in each the first ones of all `rows`, below one another."""
    count = -(-len(rows[0]) // COLUMNS)
    canvas = Image.new("RGB", (COLUMNS * TILE, count * (len(rows) * TILE + TILE // 8)), "#8899aa")
    for i, pictures in enumerate(rows):
        for k, picture in enumerate(pictures):
            down, across = divmod(k, COLUMNS)
            top = down * (len(rows) * TILE + TILE // 8) + i * TILE
            canvas.paste(picture.resize((TILE, TILE), Image.Resampling.LANCZOS), (across * TILE, top))
    return canvas


def firsts(run: Path, prompts: list[str]) -> list[Image.Image]:
    """The first image of each prompt."""
    paths = {row["prompt"]: row["path"] for row in reversed(read_finished(run)[0])}
    return [read_image(run / paths[prompt]) for prompt in prompts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("flags", type=Path)
    parser.add_argument("--new", type=Path, nargs=2, required=True)
    parser.add_argument("--old", type=Path, nargs=2, required=True)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = read_rows(arguments.flags / "metadata.jsonl")
    files = {row["name"]: arguments.flags / row["file_name"] for _, row in rows}
    gallery, names = read_gallery()
    pictures = [read_image(path) for path in files.values()]
    added = torch.from_numpy(np.stack([to_pixels(picture, GALLERY_SIZE) for picture in pictures]))
    gallery, names = torch.cat([gallery, added]), [*names, *files]
    print("| run | prompts | images | retrieval | passes per image |\n| --- | --- | --- | --- | --- |")
    for run in (*arguments.new, *arguments.old):
        print("\n".join(describe(run, hits(run, gallery, names))))
    if arguments.out is not None:
        new = sheet([pictures, *(firsts(run, list(files)) for run in arguments.new)])
        # Evenly among the names.
        known = [row["prompt"] for row in read_finished(arguments.old[0])[0] if row["metadata"]["check"] == "known"]
        chosen = known[:: len(known) // COLUMNS][:COLUMNS]
        old = sheet([firsts(run, chosen) for run in arguments.old])
        whole = Image.new("RGB", (new.width, new.height + old.height))
        whole.paste(new, (0, 0))
        whole.paste(old, (0, new.height))
        whole.save(arguments.out)


if __name__ == "__main__":
    main()
