"""The packaged reference of emoji: a gallery of pictures, and features of pictures that packaged models learned.
The card in `assets/emoji-reference` describes it."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from arimage.eval.runs.run_folder import read_rows
from arimage.media import gallery
from arimage.media.files import to_rgb

from .. import REFERENCE


def read_gallery(folder: Path = REFERENCE) -> tuple[torch.Tensor, list[str]]:
    """The pictures of the gallery, float [K, 3, 32, 32] in [0, 1], and the name of each."""
    return gallery.read_gallery(folder)


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
