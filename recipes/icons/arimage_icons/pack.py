"""`python -m arimage_icons.pack`: pictures, captions and the codebook of patches as one file for training."""

import argparse
import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image

from arimage import PatchVQModel
from arimage.training.quantisers import kmeans

from .words import styles_of


SPLITS = ("train", "val", "test")
# K-means looks at this many pictures, and at this many of their patches.
PICTURES, POINTS = 8000, 200_000


def ink(pixels: torch.Tensor) -> torch.Tensor:
    """Grey pixels uint8 [B, H, W] as images [B, 3, H, W] in [-1, 1]."""
    return (pixels.float() / 127.5 - 1)[:, None].expand(-1, 3, -1, -1)


def fit_codebook(vq: PatchVQModel, pixels: torch.Tensor, generator: torch.Generator) -> None:
    """Fit the codebook of `vq` to pixels uint8 [B, H, W] by k-means. Most patches are blank, so a patch counts as
    often as the square root of how often it is there."""
    chosen = torch.randperm(len(pixels), generator=generator)[:PICTURES]
    patches = vq.to_patches(ink(pixels[chosen])).flatten(0, 2)
    points, counts = torch.unique((patches * 8).round() / 8, dim=0, return_counts=True)
    drawn = torch.multinomial(counts.float().sqrt(), min(POINTS, len(points)), replacement=True, generator=generator)
    with torch.no_grad():
        vq.codebook.weight.copy_(kmeans(points[drawn], len(vq.codebook.weight), generator, spherical=False))


def read(path: Path) -> tuple[np.ndarray, list[tuple[str, list[str]]]]:
    """The pictures uint8 [N, H, W] of a parquet file, and their captions with their words of style."""
    table = pq.read_table(path, columns=["image", "caption", "set", "name"]).to_pydict()
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(image["bytes"])).convert("L")) for image in table["image"]])
    rows = zip(table["caption"], table["name"], table["set"], strict=True)
    return pixels, [(caption, styles_of(caption, name, icon_set)) for caption, name, icon_set in rows]


def pack(data: Path, out: Path, codebook_size: int = 512, patch_size: int = 4) -> None:
    """Write `out`, an .npz file, from train.parquet, val.parquet and test.parquet in `data`."""
    arrays, captions = {}, {}
    for split in SPLITS:
        arrays[split], captions[split] = read(data / f"{split}.parquet")
        print(f"{split}: {len(arrays[split])} pictures", flush=True)
    vq = PatchVQModel(patch_size, codebook_size, channels=1)
    fit_codebook(vq, torch.from_numpy(arrays["train"]), torch.Generator().manual_seed(0))
    with torch.no_grad():
        pictures = ink(torch.from_numpy(arrays["test"]))
        errors = torch.cat([(vq.decode(vq.encode(it)) - it).square().mean((1, 2, 3)) for it in pictures.split(256)])
    print(f"PSNR of test {float((4 / errors.clamp_min(4e-6)).log10().mul(10).mean()):.2f} dB", flush=True)
    text = np.frombuffer(json.dumps(captions).encode(), np.uint8)
    np.savez_compressed(out, codebook=vq.codebook.weight.detach().numpy(), captions=text, **arrays)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train, val and test.parquet")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    given = parser.parse_args()
    pack(given.data, given.out)
