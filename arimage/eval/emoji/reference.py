"""The packaged reference of emoji: a gallery of pictures, and features of pictures that packaged models learned.
The card in `arimage/assets/emoji-reference` describes it."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from ...auto import ASSETS
from ...media.files import read_image, to_rgb
from ..runs.run_folder import read_rows


REFERENCE = ASSETS / "emoji-reference"
GALLERY_SIZE, GALLERY_COLUMNS = 32, 64


def read_gallery(folder: Path = REFERENCE) -> tuple[torch.Tensor, list[str]]:
    """The pictures of the gallery, float [K, 3, 32, 32] in [0, 1], and the name of each."""
    names = (folder / "gallery.txt").read_text(encoding="utf-8").split("\n")[:-1]
    sheet = torch.from_numpy(np.asarray(read_image(folder / "gallery.webp")) / np.float32(255))
    tiles = sheet.unflatten(0, (-1, GALLERY_SIZE)).unflatten(2, (-1, GALLERY_SIZE)).permute(0, 2, 4, 1, 3)
    return tiles.flatten(0, 1)[: len(names)], names


def reference_features(folder: Path = REFERENCE) -> np.ndarray:
    """The features of the pictures of `prompts.jsonl`, float32 [M, D], as `EmojiExtractor` computes them."""
    return np.load(folder / "features.npy").astype(np.float32)


def asked_names(run: Path, known: list[str]) -> list[str]:
    """The name of the emoji that each image of a run should show, in manifest order.

    Raises:
        ValueError: if a row of the manifest has no name, or one that is not among `known`.
    """
    names = [row.get("metadata", {}).get("name") for row in read_rows(run)]
    strangers = sorted({str(name) for name in names} - set(known))
    if strangers:
        raise ValueError(
            f"the reference has no picture of {strangers[0]!r}, which {run} has: generate with --prompts emoji"
        )
    return names


def to_pixels(image: Image.Image, size: int) -> np.ndarray:
    """float32 [3, size, size] in [0, 1]; downscaling averages the covered pixels."""
    image = to_rgb("a picture", image).resize((size, size), Image.Resampling.BOX)
    return np.asarray(image, np.float32).transpose(2, 0, 1) / 255
